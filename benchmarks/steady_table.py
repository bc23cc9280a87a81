"""The tables of benchmarks/steady.py, for a terminal and as Markdown."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from steady_cells import Choice, Side, in_words
from steady_measure import Measured, Result
from steady_models import WORKLOADS

TIME = (
    "",
    "ours, ms",
    "beside",
    "its ms",
    "ratio",
    "aim",
    "half of the pairs",
    "pairs",
    "peak, MB",
    "sent, MB",
    "others",
)
MEMORY = ("peak memory of a worker, without snapshots", "ours, MB", "plain, MB", "more, in gradients")
EXPLAINED = (
    "ratio: the median over neighbouring turns, of the mean seconds of a step, with its standard error."
    " aim: what it should be at most."
    " peak: resident memory of the worker with the most, ours / the other's; ours has snapshots in it, in memory that"
    " is shared with the agent. sent: by all workers through the network interface of this machine, a step. others: share of the processors' time that other programs took in the turns."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A table as text: what it has for columns, and its rows."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def rich(self) -> Table:
        table = Table()
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        separator = tuple("---" for _ in self.columns)
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.columns, separator, *self.rows))


def of_time(results: Sequence[Result]) -> Lines:
    return Lines(columns=TIME, rows=[row for result in _in_place(results) for row in _time_rows(result)])


def of_memory(results: Sequence[Result]) -> Lines:
    return Lines(
        columns=MEMORY, rows=[_memory_row(each) for each in _in_place(results) if each.cell.is_of_memory]
    )


def _in_place(results: Sequence[Result]) -> list[Result]:
    return sorted(results, key=lambda result: result.cell.place)


def remarks(choice: Choice, failed: Sequence[str], not_begun: Sequence[str]) -> list[str]:
    """What a reader of the table must know beside it; a line each."""
    found = [EXPLAINED]
    cores = os.cpu_count() or 1
    if any(cell.workers > cores for cell in choice.cells):
        found.append(f"The machine has {cores} cores; more workers than that share them.")
    if failed:
        found.append(f"Failed, and so not in the table: {' '.join(failed)}")
    if not_begun:
        found.append(f"Not measured, as the time was up or a signal came: {' '.join(not_begun)}")
    if choice.too_wide:
        found.append(f"More workers than GPUs: {'; '.join(in_words(choice.too_wide))}")
    if choice.left_out:
        found.append(f"Left out (--all measures them): {'; '.join(in_words(choice.left_out))}")
    return found


def _time_rows(result: Result) -> list[tuple[str, ...]]:
    """One for each program beside ours."""
    own = result.measured[Side.OURS]
    rows: list[tuple[str, ...]] = []
    for side, ratio in result.ratios().items():
        other = result.measured[side]
        row = (
            result.cell.title,
            _ms(own),
            side.value,
            _ms(other),
            f"{ratio.median:.3f} ± {ratio.error:.3f}",
            _aim(ratio.median, result.cell.aim if not rows else None),
            f"{ratio.lower:.3f} to {ratio.upper:.3f}",
            str(ratio.pairs),
            f"{_peak(own)} / {_peak(other)}",
            f"{_sent(own)} / {_sent(other)}",
            f"{result.others_share or 0.0:.0%}",
        )
        rows.append(row)
    return rows


def _memory_row(result: Result) -> tuple[str, ...]:
    own, plain = result.measured[Side.OURS], result.measured[Side.PLAIN]
    more = (own.peak_bytes - plain.peak_bytes) / WORKLOADS[result.cell.model].gradient_bytes()
    return result.cell.title, _peak(own), _peak(plain), f"{more:.1f}"


def _aim(found: float, aim: float | None) -> str:
    return "" if aim is None else f"{aim:g}{' missed' if found > aim else ''}"


def _ms(measured: Measured) -> str:
    return f"{statistics.median(turn.step_s for turn in measured.turns) * 1e3:.4g}"


def _sent(measured: Measured) -> str:
    step_s = statistics.median(turn.step_s for turn in measured.turns)
    return f"{measured.sent_bytes_per_s * step_s / 1e6:.3g}"


def _peak(measured: Measured) -> str:
    gpu = f" and {measured.device_bytes / 1e6:.0f} of the GPU" if measured.device_bytes else ""
    return f"{measured.peak_bytes / 1e6:.0f}{gpu}"
