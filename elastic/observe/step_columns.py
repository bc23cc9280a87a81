"""What a report computes with of each step, in a hundredth of the memory that the lines would take.

A run may have millions of steps.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from elastic.observe.slow_ranks import Tally
from elastic.observe.step_batch import NO_CLOCK, StepBatch, added_up, batch_of, known, number
from elastic.observe.step_line import StepLine

DURATION_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


def _doubles() -> "array[float]":
    return array("d")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSteps:
    """When a generation trained: when its first step that counts began, when the last one ended.

    seconds: those in its steps.
    """

    begin: float
    end: float
    seconds: float


@dataclass(slots=True, kw_only=True)
class Durations:
    """How long steps took, each once: also a step that was done again counts as it was first seen.

    counts: by the upper bound, with one more for those beyond. seconds: all together. highest: the
    newest step that was counted.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BOUNDS_S) + 1))
    seconds: float = 0.0
    highest: int = 0

    def add(self, steps: StepBatch) -> None:
        own_s = known(steps.seconds[steps.step > self.highest])
        found = np.bincount(np.searchsorted(DURATION_BOUNDS_S, own_s), minlength=len(self.counts))
        self.counts = [before + now for before, now in zip(self.counts, found.tolist(), strict=True)]
        self.seconds += float(own_s.sum())
        self.highest = max(self.highest, int(steps.step.max(initial=0)))


@dataclass(slots=True, kw_only=True)
class StepColumns:
    """last_step, last_time_s: of the last line, 0 and None where there is none. seconds: of the
    steps that say how long they took. times_s: when steps ended, by generation. last_of: by
    generation, the step of its last line. num_audited: steps that were audited. num_unreadable:
    lines that are none of a step. durations: goes on where a new file begins. counted, paces: by
    generation, for goodput.py and slow_ranks.py.
    """

    last_step: int = 0
    last_time_s: float | None = None
    seconds: "array[float]" = field(default_factory=_doubles)
    times_s: "dict[int, array[float]]" = field(default_factory=dict)
    last_of: dict[int, int] = field(default_factory=dict)
    num_audited: int = 0
    num_unreadable: int = 0
    durations: Durations = field(default_factory=Durations)
    counted: dict[int, GenerationSteps] = field(default_factory=dict)
    paces: dict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def add(self, steps: StepBatch) -> None:
        """The next steps, in their order."""
        self.num_unreadable += steps.num_unreadable
        self.durations.add(steps)
        self.num_audited += steps.audited.count(True)
        for generation, own in steps.by_generation():
            self._add(generation, own)
        if len(steps):
            self.last_step, self.last_time_s = int(steps.step[-1]), number(steps.time[-1])

    def _add(self, generation: int, own: StepBatch) -> None:
        """own: steps of this generation."""
        self.last_of[generation] = int(own.step[-1])
        self.seconds.frombytes(known(own.seconds).tobytes())
        self.paces[generation].add(own)
        times_s = known(own.time)
        if len(times_s):
            self.times_s.setdefault(generation, _doubles()).frombytes(times_s.tobytes())
            taken_s = np.nan_to_num(own.seconds[~np.isnan(own.time)])
            before = self.counted.get(generation)
            self.counted[generation] = GenerationSteps(
                begin=float(times_s[0] - taken_s[0]) if before is None else before.begin,
                end=float(times_s[-1]),
                seconds=added_up(taken_s, 0.0 if before is None else before.seconds),
            )


def columns_of(lines: Iterable[StepLine], ahead: Mapping[int, float] = NO_CLOCK) -> StepColumns:
    """ahead: as in StepBatch.moved."""
    found = StepColumns()
    found.add(batch_of([*lines]).moved(ahead))
    return found
