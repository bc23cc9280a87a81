"""What a run's events and metrics add up to, kept up to date event by event and line by line.

A total that is called a counter never falls, also where the run goes back and does steps again: a
step counts when its line is first seen. The totals follow from the files alone, so that an agent
that starts in the middle of a run counts as one that saw all of it. `step_time` alone does not
promise that: the files have lost the lines of steps that the run went back over, so an agent that
begins before they are done again counts fewer. It does not read anything.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

from elastic import events as kinds
from elastic.events import Event
from elastic.observe.generation_end import Start
from elastic.observe.logged_event import Events, LoggedEvent, by_generation, in_order, last, of_kind
from elastic.observe.newest_checkpoint import Commit, newest_checkpoint, newest_commits
from elastic.observe.one_clock import ahead_of_generations, ahead_s, moved
from elastic.observe.recovery import SIGNS, Recovery, recovery_of, since_new_step
from elastic.observe.slow_ranks import SlowRank, Tally
from elastic.observe.step_columns import columns_of
from elastic.observe.step_line import StepLine

# What a recovery is measured by, and what the run's time is divided by.
_SIGNS = (*SIGNS, kinds.FaultInjected, kinds.Restored, kinds.FirstStep, kinds.RunInterrupted)
_MARKS = (kinds.GenerationStarted, kinds.GenerationEnded, kinds.RunInterrupted, kinds.Restored)
_OF_CHECKPOINTS = (kinds.CheckpointCommitted, kinds.CheckpointRejected, kinds.Restored)
_GENERATIONS_KEPT = 8
_COMMITS_KEPT = 1000  # more than are rejected in a row
PHASES = ("detect", "rendezvous", "down", "restore", "first_step")
STEP_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
RECOVERY_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(slots=True)
class Histogram:
    """bounds: the upper ones, in seconds; the last bucket has none."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A recovery that is over: with the first step of `generation` that was never done before."""

    generation: int
    step: int
    time: float
    recovery: Recovery


class RunTotals:
    """steps: the highest step that was ever done. saving_s: what committed checkpoints took.

    recovered: recoveries that are over, in the order in which they were counted.
    """

    def __init__(self) -> None:
        self.steps = self.lost_steps = 0
        self.saving_s = 0.0
        self.step_time = Histogram(STEP_BOUNDS_S)
        self.recovered: list[Recovered] = []
        self.recovery_time: dict[str, Histogram] = {}
        self.phase_time: dict[tuple[str, str], Histogram] = {}
        self.checkpoints: Counter[str] = Counter()
        self.started: LoggedEvent[kinds.RunStarted] | None = None
        self._commits: list[Commit] = []
        self._after_commits: list[LoggedEvent[Event]] = []  # what became of checkpoints
        self._newest_commit: Commit | None = None
        self._is_newest_known = True
        self._pace = Tally()  # of the generation of the newest line
        self._pace_of = 0
        self._nodes: dict[int, dict[int, str]] = defaultdict(dict)  # by generation and rank
        self._observed = 0  # the highest step whose line was added
        self._seen = defaultdict[int, dict[str, float]](dict)
        self._signs = defaultdict[int, list[LoggedEvent[Event]]](list)  # by generation
        self._marks: list[LoggedEvent[Event]] = []
        self._marks_in_order: Events | None = None
        self._begun = set[tuple[int, str]]()  # generations and nodes that have a worker in them
        self._ahead: Mapping[str, float] = {}
        # Of generations whose recovery is not counted yet.
        self._first_steps_to_count: dict[int, LoggedEvent[kinds.FirstStep]] = {}
        self._newest_with_new_step = 0  # of generations

    def add_line(self, line: StepLine) -> None:
        self.steps = max(self.steps, line.step)
        if line.generation != self._pace_of:
            self._pace, self._pace_of = Tally(), line.generation
        self._pace.add_line(line)
        if line.step > self._observed:
            self._observed = line.step
            if line.seconds is not None:
                self.step_time.observe(float(line.seconds))

    def add_event(self, logged: LoggedEvent[Event]) -> None:
        event, seen_s = logged.event, self._seen[logged.generation]
        seen_s[logged.node] = max(logged.time, seen_s.get(logged.node, logged.time))
        if isinstance(event, _SIGNS):
            self._signs[logged.generation].append(logged)
        is_first_worker = (
            isinstance(event, kinds.WorkerStarted) and (logged.generation, logged.node) not in self._begun
        )
        if isinstance(event, _MARKS) or is_first_worker:
            self._marks.append(logged)
            self._marks_in_order = None
        if isinstance(event, _OF_CHECKPOINTS):
            self._add_checkpoint_event(logged)
        match event:
            case kinds.WorkerStarted():
                self._begun.add((logged.generation, logged.node))
                self._nodes[logged.generation][event.rank] = logged.node
                for old in sorted(self._nodes)[:-_GENERATIONS_KEPT]:
                    del self._nodes[old]
            case kinds.Restored():
                self.lost_steps += event.lost_steps
                self.steps = max(self.steps, event.step + event.lost_steps)
            case kinds.FirstStep():
                self._first_steps_to_count[logged.generation] = cast("LoggedEvent[kinds.FirstStep]", logged)
                self._newest_with_new_step = max(self._newest_with_new_step, logged.generation)
            case kinds.RunStarted() if self.started is None or logged.generation >= self.started.generation:
                self.started = cast("LoggedEvent[kinds.RunStarted]", logged)
            case kinds.CheckpointCommitted():
                self.checkpoints["committed"] += 1
                self.saving_s += event.seconds
            case kinds.CheckpointFailed():
                self.checkpoints["failed"] += 1
            case kinds.CheckpointFenced():
                self.checkpoints["fenced"] += 1
            case _:
                pass

    def _add_checkpoint_event(self, logged: LoggedEvent[Event]) -> None:
        self._is_newest_known = False
        if not isinstance(logged.event, kinds.CheckpointCommitted):
            self._after_commits.append(logged)
            return
        self._commits.append(cast("Commit", logged))
        if len(self._commits) > 2 * _COMMITS_KEPT:
            self._commits = newest_commits(self._commits, _COMMITS_KEPT)

    @property
    def committed(self) -> Commit | None:
        """The newest checkpoint."""
        if not self._is_newest_known:
            self._newest_commit = newest_checkpoint([*self._commits, *self._after_commits])
            self._is_newest_known = True
        return self._newest_commit

    @property
    def slow_ranks(self) -> list[SlowRank]:
        """Of the newest generation, for which the others wait."""
        nodes, seconds = self._nodes[self._pace_of], self._pace.seconds
        return [
            SlowRank(rank=rank, node=nodes.get(rank, ""), share=min(1.0, cost_s / seconds))
            for rank, cost_s in sorted(self._pace.costs_s().items())
        ]

    @property
    def seen_s(self) -> dict[int, float]:
        """By generation, the time of its last event; seconds since 1970."""
        ahead = self.ahead()
        return {
            generation: max(time - ahead.get(node, 0.0) for node, time in by_node.items())
            for generation, by_node in self._seen.items()
        }

    def ahead(self) -> Mapping[str, float]:
        """By node, how far its clock is ahead (one_clock.py)."""
        self.marks()
        return self._ahead

    def marks(self) -> Events:
        """Where generations began and ended, and agents left, in order and by one clock."""
        if self._marks_in_order is None:
            found = in_order(self._marks)
            self._ahead = ahead_s(found)
            self._marks_in_order = moved(found, self._ahead)
        return self._marks_in_order

    @property
    def start(self) -> Start | None:
        """The newest generation."""
        return last(self.marks(), kinds.GenerationStarted)

    @property
    def restarts(self) -> int:
        """In a row without a new step, up to now; 0 before the first generation."""
        start = self.start
        if start is None or start.generation <= self._newest_with_new_step:
            return 0
        return start.event.restarts

    def count_recoveries(self, lines_of: Callable[[int], Sequence[StepLine]]) -> None:
        """Once all events and lines that are there were added: recoveries that are over by now.

        lines_of: the last lines of a generation.
        """
        if self._first_steps_to_count:
            self._count_waiting(lines_of)
        for number in self._signs.keys() - self._kept():
            del self._signs[number]

    def _count_waiting(self, lines_of: Callable[[int], Sequence[StepLine]]) -> None:
        starts = {each.generation: each for each in of_kind(self.marks(), kinds.GenerationStarted)}
        for number in sorted(self._first_steps_to_count.keys() & starts):
            first_step = self._first_steps_to_count.pop(number)
            if starts[number].event.cause != "start":
                up_to = [starts[each] for each in sorted(starts) if each <= number]
                self._count(first_step, self._recovery(up_to, lines_of))

    @property
    def oldest_kept(self) -> int:
        """The oldest generation of which a recovery may ask again."""
        return min(self._kept(), default=0)

    def _kept(self) -> set[int]:
        """The newest generations, and those around the first fault since the last new step: between
        these there may be any number of tries.
        """
        numbers = sorted(self._signs)
        first = bisect_left(numbers, self._newest_with_new_step)
        return {*numbers[-_GENERATIONS_KEPT:], *numbers[first : first + 2]}

    def _recovery(self, starts: Sequence[Start], lines_of: Callable[[int], Sequence[StepLine]]) -> Recovery:
        """Of the last of `starts`, which are all up to it."""
        own = by_generation(moved(in_order(chain.from_iterable(self._signs.values())), self.ahead()))
        oldest = min(self._signs, default=0)
        kept = since_new_step(own, [each for each in starts if each.generation >= oldest])
        lines = [line for start in kept[:-1] for line in lines_of(start.generation)]
        trained = columns_of(lines, ahead_of_generations(self.marks()))
        return recovery_of(own, trained, kept, self.seen_s)

    def _count(self, first_step: LoggedEvent[kinds.FirstStep], recovery: Recovery) -> None:
        self.recovered.append(
            Recovered(
                generation=first_step.generation,
                step=first_step.event.step,
                time=first_step.time,
                recovery=recovery,
            )
        )
        cause = recovery.cause
        if recovery.total_s is not None:
            self.recovery_time.setdefault(cause, Histogram(RECOVERY_BOUNDS_S)).observe(recovery.total_s)
        for phase in PHASES:
            seconds = getattr(recovery, f"{phase}_s")
            if seconds is not None:
                self.phase_time.setdefault((cause, phase), Histogram(RECOVERY_BOUNDS_S)).observe(seconds)
