"""A worker is called hung only after a silence that its place in the work does not explain, by the observer's own attention.

Only a step's own part is short and much like the last one, so only its limit is learned: ten times the longest that was seen to end on this node, within 10 s and 1800 s,
and 1800 s until the worker has ended three. The recipe's own code (an evaluation comes once in a thousand steps), starting, saving and a generation's first steps (which
compile) tell nothing about how long they take the next time; they get 1800 s.

`elastic.system.silence` says why an observer that was itself stopped or starved does not blame a worker at its first look.
It does not promise to be right: what takes longer than ever before is taken for hung. Nor does it know of other nodes; each judges its own workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from elastic.system.phase import Phase
from elastic.system.silence import Silence, longest_gap_s

SHORTEST_S = 10.0
LONGEST_S = 1800.0
TIMES = 10.0
ENOUGH = 3
# Who waits is a victim of somebody whose own limit ends first; only where nobody was found is there something wrong with the waiting itself.
PATIENCE_OF_VICTIMS = 2.0

_DOING = {
    Phase.START: "starting, restoring or in its first steps",
    Phase.STEP: "in its own part of a step",
    Phase.WAIT: "waiting for other ranks, of whom none is known to hang",
    Phase.BETWEEN: "in the recipe's own code or its data",
    Phase.SAVE: "saving or comparing its state",
    Phase.AFTER: "after the last step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    """What one look shows of one worker; two that are equal are silence."""

    step: int  # the last that it finished
    place: Phase
    beats: int
    is_stopped: bool  # by a signal, as SIGSTOP


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    rank: int
    place: Phase
    silence_s: float
    limit_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHistory:
    """What is known of one worker of this generation."""

    sight: WorkerSample
    since_s: float  # no later than the stretch began in which it is
    silence: Silence
    is_whole: bool  # nothing but its work explains the length of the stretch
    steps: int  # stretches of steps' own parts that it has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDetector:
    """What one agent has seen of its workers so far; start with an empty one.

    `fixed_s`: the limit for a step and for the recipe's own code; None where it is to be learned.
    """

    fixed_s: float | None
    looked_s: float = 0.0
    longest_step_s: float = 0.0  # stretch of a step's own part that ended
    workers: Mapping[int, WorkerHistory] = field(default_factory=dict)

    def anew(self) -> "HangDetector":
        """For the workers of a new generation; what was learned stays."""
        return replace(self, workers={})

    def look(self, sights: Mapping[int, WorkerSample], *, now_s: float) -> "HangDetector":
        """`sights`: of every worker that runs, by rank; those that are not named are forgotten."""
        workers, longest_s = {}, self.longest_step_s
        for rank, sight in sights.items():
            last = self.workers.get(rank)
            if last is None:
                workers[rank] = WorkerHistory(
                    sight=sight, since_s=now_s, silence=Silence(), is_whole=False, steps=0
                )
                continue
            length_s = self._ended(last, sight, now_s)
            longest_s = max(longest_s, length_s or 0.0)
            workers[rank] = self._see(last, sight, now_s, steps=last.steps + (length_s is not None))
        return replace(self, looked_s=now_s, longest_step_s=longest_s, workers=workers)

    @property
    def hung(self) -> Hung | None:
        """The first to blame: a stopped process, then one at work, then one that waits."""
        over = [
            (rank, seen) for rank, seen in self.workers.items() if seen.silence.seconds > self._limit_s(seen)
        ]
        if not over:
            return None
        rank, seen = min(over, key=lambda found: self._guilt(*found))
        return Hung(
            rank=rank,
            place=seen.sight.place,
            silence_s=seen.silence.seconds,
            limit_s=self._limit_s(seen),
            reason=self._reason(rank, seen),
        )

    def _ended(self, last: WorkerHistory, sight: WorkerSample, now_s: float) -> float | None:
        """Length, rounded up, of a stretch of a step's own part that ended since the last look."""
        was_away = now_s - self.looked_s > longest_gap_s(self._limit_s(last))
        if was_away or not last.is_whole or sight.is_stopped or last.sight.place is Phase.START:
            return None
        if last.sight.place is Phase.STEP and sight.beats != last.sight.beats:
            return now_s - last.since_s
        # A step that is finished had parts that came and went unseen.
        return now_s - self.looked_s if sight.step > last.sight.step else None

    def _see(self, last: WorkerHistory, sight: WorkerSample, now_s: float, *, steps: int) -> WorkerHistory:
        elapsed_s, limit_s = now_s - self.looked_s, self._limit_s(last)
        is_whole = elapsed_s <= longest_gap_s(limit_s) and not (sight.is_stopped or last.sight.is_stopped)
        if sight != last.sight:
            # It may have begun right after the last look.
            return WorkerHistory(
                sight=sight, since_s=self.looked_s, silence=Silence(), is_whole=is_whole, steps=steps
            )
        return replace(
            last,
            silence=last.silence.grow(elapsed_s, limit_s=limit_s),
            is_whole=is_whole and last.is_whole,
        )

    def _limit_s(self, seen: WorkerHistory) -> float:
        steady_s = LONGEST_S if self.fixed_s is None else self.fixed_s
        if seen.sight.is_stopped:  # wherever it is, it does not work
            return SHORTEST_S if self.fixed_s is None else steady_s
        match seen.sight.place:
            case Phase.AFTER:
                return inf
            case Phase.START | Phase.SAVE:
                return max(steady_s, LONGEST_S)
            case Phase.STEP:
                return self._learned_s(seen) if self.fixed_s is None else steady_s
            case Phase.BETWEEN:
                return steady_s
            case Phase.WAIT:
                # Rank 0 may evaluate while all others wait for it in the next step: what a peer may take, those who wait may.
                return PATIENCE_OF_VICTIMS * steady_s

    def _learned_s(self, seen: WorkerHistory) -> float:
        if seen.steps < ENOUGH:  # of its own: others may have less to do
            return LONGEST_S
        return min(max(TIMES * self.longest_step_s, SHORTEST_S), LONGEST_S)

    def _guilt(self, rank: int, seen: WorkerHistory) -> tuple[int, float, int]:
        """The smallest is to blame."""
        kind = 0 if seen.sight.is_stopped else 2 if seen.sight.place is Phase.WAIT else 1
        return kind, -seen.silence.seconds / self._limit_s(seen), rank

    def _reason(self, rank: int, seen: WorkerHistory) -> str:
        where = "in a process that a signal stopped" if seen.sight.is_stopped else _DOING[seen.sight.place]
        is_learned = seen.sight.place is Phase.STEP and not seen.sight.is_stopped and self.fixed_s is None
        known = f", the longest before took {self.longest_step_s:.2g} s" if is_learned else ""
        return (
            f"rank {rank} hangs: no progress for {seen.silence.seconds:.3g} s {where} "
            f"(limit {self._limit_s(seen):.4g} s{known}; --hang-timeout sets another)"
        )
