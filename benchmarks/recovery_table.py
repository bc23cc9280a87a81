"""The tables of benchmarks/recovery.py; tries without recovery are counted, not averaged in."""

import statistics
from collections import Counter
from typing import Any

from recovery_cases import CASES, Measured
from rich.table import Table

PHASES = ("detect_s", "rendezvous_s", "restore_s", "first_step_s", "total_s")


def summary(figures: list[Measured]) -> str:
    """The cell of one launcher with few tries."""
    good = [m for m in figures if m.seconds is not None]
    if not good:
        return "did not recover" if figures else "-"
    text = f"{_median_s(good):.1f} s"
    if any(m.lost_steps is not None for m in good):
        text += f", {max(m.lost_steps or 0 for m in good)} lost"
    return text if len(good) == len(figures) else f"{text} ({len(good)} of {len(figures)} tries)"


def comparison(results: dict[str, list[Measured]], caption: str) -> Table:
    ours_name, *theirs = results
    columns = ("case", "n", "ours median s", "ours worst s", "steps lost", *theirs, "ratio")
    table = Table(*columns, title="Fault to end of first new step", caption=caption)
    for what in (row for case in CASES.values() for row in case.rows):
        by_launcher = {name: [m for m in figures if m.what == what] for name, figures in results.items()}
        if not any(by_launcher.values()):
            continue
        mine = by_launcher[ours_name]
        good = [m for m in mine if m.seconds is not None]
        median, worst = ("-", "-")
        if good:
            median, worst = f"{_median_s(good):.2f}", f"{max(m.seconds or 0.0 for m in good):.2f}"
        lost = [m.lost_steps for m in good if m.lost_steps is not None]
        lost_text = f"{min(lost)} to {max(lost)}" if lost else "-"
        cells = [summary(by_launcher[name]) for name in theirs]
        table.add_row(
            what, f"{len(good)}/{len(mine)}", median, worst, lost_text, *cells, _ratio(by_launcher, good)
        )
    return table


def notes(results: dict[str, list[Measured]]) -> list[str]:
    """Further observations, and how tries ended that did not recover."""
    seen = Counter((name, m.what, m.note) for name, figures in results.items() for m in figures if m.note)
    return [f"{name}, {what}: {note} ({count} tries)" for (name, what, note), count in seen.items()]


def _ratio(by_launcher: dict[str, list[Measured]], mine: list[Measured]) -> str:
    """The median of the fastest other launcher that recovered, divided by ours."""
    recovered = [[m for m in figures if m.seconds is not None] for figures in list(by_launcher.values())[1:]]
    times = [_median_s(figures) for figures in recovered if figures]
    return f"{min(times) / _median_s(mine):.0f}" if times and mine else "-"


def _median_s(figures: list[Measured]) -> float:
    return statistics.median(m.seconds for m in figures if m.seconds is not None)


def phases(recoveries: list[dict[str, Any]]) -> Table:
    """The recoveries by the reports of elastic-train: medians for each cause.

    The times start when a fault first shows in the events.
    """
    table = Table(
        "cause", "n", "source", "lost steps", *PHASES, title="Ours, as elastic-train report tells it"
    )
    for cause in sorted({r["cause"] for r in recoveries}):
        mine = [r for r in recoveries if r["cause"] == cause]
        sources = ", ".join(f"{n}x {source}" for source, n in Counter(r["source"] for r in mine).items())
        lost = sum(r["lost_steps"] for r in mine)
        known = [[r[phase] for r in mine if r[phase] is not None] for phase in PHASES]
        medians = [f"{statistics.median(values):.3f}" if values else "-" for values in known]
        table.add_row(cause, str(len(mine)), sources, str(lost), *medians)
    return table
