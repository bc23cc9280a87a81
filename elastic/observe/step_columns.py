"""What a report computes with of each step, in a hundredth of the memory that the lines would take.

A run may have millions of steps. Numbers are added up and compared in the order of the steps, as
those of the lines would be: no figure depends on how they are kept.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.observe.slow_ranks import Tally
from elastic.observe.step_line import StepLine


def _doubles() -> "array[float]":
    return array("d")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSteps:
    """Of a generation: when its first step that counts began, when the last one ended.

    seconds: those in its steps.
    """

    begin: float
    end: float
    seconds: float


def add_step(steps: dict[int, GenerationSteps], line: StepLine) -> None:
    """Count the next line to its generation. One without a time has no place in the run's time."""
    if line.time is None:
        return
    own, seconds = steps.get(line.generation), line.seconds or 0.0
    steps[line.generation] = GenerationSteps(
        begin=line.time - seconds if own is None else own.begin,
        end=line.time,
        seconds=seconds if own is None else own.seconds + seconds,
    )


@dataclass(slots=True, kw_only=True)
class StepColumns:
    """last_step, last_time_s: of the last line, 0 and None where there is none. seconds: of the
    steps that say how long they took. times_s: when steps ended, by generation. last_of: by
    generation, the step of its last line. num_audited: steps that were audited. counted, paces: by
    generation, for goodput.py and slow_ranks.py.
    """

    last_step: int = 0
    last_time_s: float | None = None
    seconds: "array[float]" = field(default_factory=_doubles)
    times_s: "dict[int, array[float]]" = field(default_factory=dict)
    last_of: dict[int, int] = field(default_factory=dict)
    num_audited: int = 0
    counted: dict[int, GenerationSteps] = field(default_factory=dict)
    paces: dict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))

    def add(self, line: StepLine) -> None:
        """The next line."""
        self.last_step, self.last_time_s = line.step, line.time
        self.last_of[line.generation] = line.step
        if line.seconds is not None:
            self.seconds.append(line.seconds)
        if line.time is not None:
            self.times_of(line.generation).append(line.time)
        self.num_audited += line.audited is True
        add_step(self.counted, line)
        self.paces[line.generation].add(line)

    def times_of(self, generation: int) -> "array[float]":
        return self.times_s.setdefault(generation, _doubles())


def columns_of(lines: Iterable[StepLine]) -> StepColumns:
    found = StepColumns()
    for line in lines:
        found.add(line)
    return found
