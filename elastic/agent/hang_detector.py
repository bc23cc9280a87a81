"""A worker is called hung only after a silence that its phase does not explain.

A worker is silent while its heartbeat does not change. How long a silence is normal depends on what
the worker is doing:

- Its own part of a step takes about as long as in the steps before. Only this limit is learned: ten
  times the longest part that this node has seen, at least 10 s and at most 1800 s; a pause of the
  machine or of the worker counts as a part of the step. Until a worker has ended three such parts
  itself, its limit is 1800 s.
- The recipe's own code, starting, saving, and the first steps of a generation give no hint of how
  long they will take the next time. An evaluation may come once in a thousand steps, and the first
  steps compile. Their limit is 1800 s.
- What the recipe does after its last step is saved may take any time. It has no limit; only a
  stopped process is found there.
- A process that a signal stopped makes no progress in any phase. Its limit is 10 s.
- Waiting for other ranks explains itself, as long as one of them works. A waiting rank is blamed
  last: the rank that it waits for normally exceeds its own limit first. Only if none does, on any
  node, is something wrong with the waiting itself, for example a network that swallows messages. So
  the limit of a waiting rank is twice that of the recipe's own code, in which a peer may be while
  others wait for it; and of several workers over their limits, a waiting one is chosen only if all
  of them wait.

`--hang-timeout` sets one limit instead for steps, for the recipe's own code and for a stopped
process; a waiting rank has twice that. Starting and saving have at least their 1800 s.

elastic/system/silence.py says why an observer that was itself stopped or starved does not blame a
worker when it comes back. The detector does not promise to be right: a step that takes far longer
than every step before it is taken for hung. Each agent judges its own workers and knows of no
others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from elastic.events import HangDetected
from elastic.system.silence import Heartbeat, Phase, attended_s

MIN_LIMIT_S = 10.0
MAX_LIMIT_S = 1800.0
STEP_FACTOR = 10.0
MIN_TIMED_STEPS = 3
WAITING_FACTOR = 2.0

_DOING = {
    Phase.START: "starting, restoring or in its first steps",
    Phase.STEP: "in its own part of a step",
    Phase.WAIT: "waiting for other ranks, of whom none is known to hang",
    Phase.BETWEEN: "in the recipe's own code or its data",
    Phase.SAVE: "saving or comparing its state",
    Phase.AFTER: "after the last step",
}


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One worker at one moment. While its samples are equal, the worker is silent."""

    heartbeat: Heartbeat
    is_stopped: bool  # by a signal such as SIGSTOP


@dataclass(slots=True)
class WorkerHistory:
    """What is known of one worker of this generation.

    A stretch is the time between two changes of the worker's heartbeat.
    """

    sample: WorkerSample
    since_s: float  # the current stretch began then or later
    silence_s: float = 0.0
    timed_steps: int = 0  # ended stretches of its own part of a step


class HangDetector:
    """What one agent has seen of its workers so far."""

    def __init__(self, fixed_limit_s: float | None) -> None:
        """fixed_limit_s: for a step and for the recipe's own code; None: the limit is learned."""
        self.fixed_limit_s = fixed_limit_s
        self.longest_step_s = 0.0  # longest ended stretch of a worker's own part of a step
        self.workers: dict[int, WorkerHistory] = {}  # a new generation begins with none
        self._observed_s = 0.0  # time of the last observation

    def observe(self, samples: Mapping[int, WorkerSample], *, now_s: float) -> None:
        """samples: one for every worker that runs, by rank. Workers without one are forgotten."""
        before, self.workers = self.workers, {}
        for rank, sample in samples.items():
            # One that is new may have been in its phase for any time before.
            worker = self.workers[rank] = before.get(rank) or WorkerHistory(sample, now_s)
            if rank not in before:
                continue
            if (length_s := self._ended_step_s(worker, sample, now_s)) is not None:
                self.longest_step_s = max(self.longest_step_s, length_s)
                worker.timed_steps += 1
            if sample == worker.sample:
                elapsed_s = now_s - self._observed_s
                worker.silence_s += attended_s(elapsed_s, limit_s=self._limit_s(worker))
            else:
                # It may have changed right after the last observation.
                worker.sample, worker.since_s, worker.silence_s = sample, self._observed_s, 0.0
        self._observed_s = now_s

    @property
    def hung(self) -> HangDetected | None:
        """The worker to blame; None while every silence is within its limit."""
        over = [rank for rank, worker in self.workers.items() if worker.silence_s > self._limit_s(worker)]
        if not over:
            return None
        rank = min(over, key=self._blame_order)
        worker = self.workers[rank]
        return HangDetected(
            rank=rank,
            place=worker.sample.heartbeat.phase.name.lower(),
            silence_s=worker.silence_s,
            limit_s=self._limit_s(worker),
            reason=self._reason(rank, worker),
        )

    def _ended_step_s(self, last: WorkerHistory, sample: WorkerSample, now_s: float) -> float | None:
        """The length, rounded up, of a worker's part of a step that has just ended."""
        before, now = last.sample.heartbeat, sample.heartbeat
        if before.phase is Phase.START:
            return None
        if before.phase is Phase.STEP and now.beats != before.beats:
            return now_s - last.since_s
        # The step was finished, so its own part began and ended between the two observations.
        return now_s - self._observed_s if now.step > before.step else None

    def _limit_s(self, worker: WorkerHistory) -> float:
        usual_s = MAX_LIMIT_S if self.fixed_limit_s is None else self.fixed_limit_s
        if worker.sample.is_stopped:
            return MIN_LIMIT_S if self.fixed_limit_s is None else usual_s
        match worker.sample.heartbeat.phase:
            case Phase.AFTER:
                return inf
            case Phase.START | Phase.SAVE:
                return max(usual_s, MAX_LIMIT_S)
            case Phase.STEP if self.fixed_limit_s is None:
                # Each worker must have ended some steps itself: another worker may have less to do,
                # and the first steps of a new worker may compile although earlier generations were
                # quick.
                if worker.timed_steps < MIN_TIMED_STEPS:
                    return MAX_LIMIT_S
                return min(max(STEP_FACTOR * self.longest_step_s, MIN_LIMIT_S), MAX_LIMIT_S)
            case Phase.STEP | Phase.BETWEEN:
                return usual_s
            case Phase.WAIT:
                # Rank 0 may evaluate while all others already wait for it in the next step, so the
                # limit of a step does not apply: a waiting rank has at least the time of its peer.
                return WAITING_FACTOR * usual_s

    def _blame_order(self, rank: int) -> tuple[int, float, int]:
        """Stopped processes first, then working ones, then waiting ones."""
        worker = self.workers[rank]
        kind = 0 if worker.sample.is_stopped else 2 if worker.sample.heartbeat.phase is Phase.WAIT else 1
        return kind, -worker.silence_s / self._limit_s(worker), rank

    def _reason(self, rank: int, worker: WorkerHistory) -> str:
        is_stopped, phase = worker.sample.is_stopped, worker.sample.heartbeat.phase
        doing = "in a process that a signal stopped" if is_stopped else _DOING[phase]
        is_learned = phase is Phase.STEP and not is_stopped and self.fixed_limit_s is None
        known = f", the longest before took {self.longest_step_s:.2g} s" if is_learned else ""
        return (
            f"rank {rank} hangs: no progress for {worker.silence_s:.3g} s {doing} "
            f"(limit {self._limit_s(worker):.4g} s{known}; --hang-timeout sets another)"
        )
