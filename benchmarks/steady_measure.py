"""One cell of the table: its programs live at once, and at most one of them trains at a time."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import processes
from paired_turns import Ratio, Turn, in_order, ratio
from steady_cells import Cell, Side
from steady_programs import LIMIT_S, POLL_S, Program, command

WARM_UP_STEPS = 5  # they allocate and connect, and the second one is audited
WARM_UP_S = 3.0  # of a turn before those that count
MEMORY_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long a cell is measured.

    least_pairs: of turns, in any case; beyond them there are as many as `cell_s` has room for.
    least_steps: in a turn.
    """

    turn_s: float
    least_pairs: int
    least_steps: int
    cell_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one program did. Peaks are of one worker; those of a GPU's memory are 0 without one."""

    turns: Sequence[Turn]
    sent_bytes_per_s: float
    peak_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """others_share: of the processors' time in the turns, what other processes took."""

    cell: Cell
    measured: dict[Side, Measured]
    others_share: float | None

    def ratios(self) -> dict[Side, Ratio]:
        """Of the seconds of a step, ours beside each other program's. Of memory there are none."""
        own, *others = self.cell.sides
        seconds = {side: [turn.step_s for turn in self.measured[side].turns] for side in self.cell.sides}
        return {} if self.cell.is_of_memory else {side: ratio(seconds[own], seconds[side]) for side in others}


def measure(cell: Cell, pace: Pace) -> Result:
    """Raises Ended if a program does."""
    with _programs(cell) as programs:
        if cell.is_of_memory:
            _wait_for_steps(programs, MEMORY_STEPS)
            return Result(cell=cell, measured=_measured(programs), others_share=None)
        _wait_for_steps(programs, WARM_UP_STEPS)
        for program in programs:
            program.turn(WARM_UP_S, pace.least_steps)
            program.processor_s, program.sent_bytes, program.trained_s = 0.0, 0, 0.0
        others_share = _take_turns(programs, pace)
        return Result(cell=cell, measured=_measured(programs), others_share=others_share)


@contextmanager
def _programs(cell: Cell) -> Iterator[list[Program]]:
    """All of them ended afterwards."""
    programs: list[Program] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        try:
            for side in cell.sides:
                folder = Path(name) / side.value
                folder.mkdir()
                programs.append(Program(command(side, cell, folder)))
            yield programs
        finally:
            for program in programs:
                program.close()


def _wait_for_steps(programs: Sequence[Program], steps: int) -> None:
    """Each is stopped as soon as it has made them, and leaves the cores to the others."""
    waiting, until_s = [*programs], time.monotonic() + LIMIT_S
    while waiting:
        time.sleep(POLL_S)
        for program in [*waiting]:
            program.check(until_s)
            if program.ends.read() >= steps:
                program.stop()
                waiting.remove(program)


def _take_turns(programs: Sequence[Program], pace: Pace) -> float:
    """Returns the share of the processors' time that other processes took."""
    until_s, rounds = time.monotonic() + pace.cell_s, 0
    others_s = turns_s = 0.0
    while rounds < pace.least_pairs or time.monotonic() < until_s:
        for program in in_order(programs, rounds):
            busy_s, began_s, own_s = processes.busy_s(), time.monotonic(), program.processor_s
            program.turns.append(program.turn(pace.turn_s, pace.least_steps))
            turns_s += time.monotonic() - began_s
            others_s += processes.busy_s() - busy_s - (program.processor_s - own_s)
        rounds += 1
    return max(0.0, others_s) / turns_s / (os.cpu_count() or 1)


def _measured(programs: Sequence[Program]) -> dict[Side, Measured]:
    return {
        program.side: Measured(
            turns=program.turns,
            sent_bytes_per_s=program.sent_bytes / max(program.trained_s, 1e-9),
            peak_bytes=program.peak_bytes(),
            device_bytes=program.ends.device_bytes,
        )
        for program in programs
    }
