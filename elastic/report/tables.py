"""Tables for people, made of the values that `--json` prints; nothing is computed.

It does not promise a stable layout: scripts read the JSON.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import astuple

from rich import box, filesize
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic.observe.run_view import RunView
from elastic.observe.step_line import loss_words
from elastic.report.figures import duration, facts
from elastic.report.runs import Runs
from elastic.system.untrusted import printable

_PHASES = ("detect", "rendezvous", "down", "restore", "first step")
_RECOVERY = ("cause", "lost", "source", *_PHASES, "total", "standby")


def show(what: RenderableType) -> None:
    # In a pipe no name is cut to the width of a screen.
    width = None if sys.stdout.isatty() else 10_000
    Console(highlight=False, width=width).print(what, soft_wrap=True)


def report_tables(name: str, view: RunView) -> RenderableType:
    parts: list[RenderableType] = [_title(name), facts_table(facts(view)), _generations(view)]
    if view.recoveries:
        rows: Iterable[tuple[object, ...]] = (astuple(each)[: len(_RECOVERY)] for each in view.recoveries)
        title = "recoveries: lost steps, phases in seconds, total since the first fault"
        parts.append(table(title, _RECOVERY, rows))
    return Group(*parts)


def status_tables(name: str, view: RunView) -> RenderableType:
    parts: list[RenderableType] = [_title(name), facts_table(facts(view, brief=True))]
    if view.workers:
        parts.append(table("workers", ("rank", "node", "pid"), map(astuple, view.workers)))
    return Group(*parts)


def runs_table(found: Runs) -> RenderableType:
    columns = ("run", "state", "step", "of", "loss", "newest step", "size", "")
    rows = (
        (
            each.name,
            each.state,
            each.step,
            each.steps,
            loss_words(each.loss) if each.step else None,
            None if each.age_s is None else f"{duration(each.age_s)} ago",
            None if each.size_bytes is None else filesize.decimal(each.size_bytes),
            each.reason or "",
        )
        for each in found.runs
    )
    return table(found.folder, columns, rows) if found.runs else cell(f"{found.folder}: no runs")


def facts_table(shown: Mapping[str, str]) -> Table:
    found = Table(show_header=False, box=None)
    found.add_column(style="dim")
    found.add_column(overflow="fold")
    for label, text in shown.items():
        found.add_row(label, cell(text))
    return found


def table(title: str, columns: Iterable[str], rows: Iterable[tuple[object, ...]]) -> Table:
    found = Table(*columns, title=_title(title), title_justify="left", box=box.SIMPLE_HEAD)
    found.padding = 0  # nine columns find room in 80 letters
    for row in rows:
        found.add_row(*(cell(_value_text(value)) for value in row))
    return found


def cell(text: str) -> Text:
    """Escaped, without markup: every node writes events, and none may command this terminal."""
    return Text(printable(text))


def _title(name: str) -> Text:
    return Text(printable(name), style="bold")


def _value_text(value: object) -> str:
    if value is None or value is False:
        return "-"
    if value is True:
        return "yes"
    return f"{value:.3f}" if isinstance(value, float) else f"{value}"


def _generations(view: RunView) -> Table:
    """The steps of a plain script are its own."""
    names = ["generation", "cause", "world_size", "nodes"]
    names += [] if view.plain else ["first_step", "last_step"]
    rows = (
        tuple(", ".join(each.nodes) if name == "nodes" else getattr(each, name) for name in names)
        for each in view.generations
    )
    return table("generations", [name.replace("_", " ") for name in names], rows)
