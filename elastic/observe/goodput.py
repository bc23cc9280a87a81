"""Where a run's time went: into steps that count, or what it was lost to. No part is negative.

The time is that from the first generation's start to the last sign of life, or to now where the run
goes on. A planned stop of the whole run is not part of that time, a crash of all nodes is: the user
chose the one, the other is what goodput is there to show. The rest is divided at marks in each
generation, its first and its last step that counts, and the parts make up the whole:

    start ── its cause ──> first step ── between steps ──> last step ── next cause ──> next start

Times are those of one_clock.py, which nodes share to within a second or so: a part that would be
negative counts as nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

from elastic import events as kinds
from elastic.observe.generation_end import (
    NODE_LOST,
    REHEARSAL,
    Start,
    down_since_s,
    ended_by_loss,
    last_seen_s,
    last_sign_s,
    left_as_planned,
    planned_stop,
)
from elastic.observe.logged_event import Events, by_generation, of_kind
from elastic.observe.step_columns import GenerationSteps, StepColumns

BETWEEN_STEPS = "between steps"
DOWN = "down"
END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """useful_s: seconds in steps that count. paused_s: those of planned stops, which are no part of
    the run's time. rehearsed_s: those of rehearsals, which are none either.

    badput_s: the others, by what they went to. The cause of a generation (start, failure, node
    lost, node joined, node left, resume) has the time from the last step that counts before it to
    the first one in it: steps that were lost, detection, rendezvous, restore. `down` is that in
    which no node was left, from the last sign of life to the command that resumed; nodes that wait
    for a lost node lose their time to that. `between steps`
    has saves, calls of `run.evaluate` and what else stops the loop there, but not what the body of
    a step does by itself; `end` what follows the last step. times: how often there was each cause,
    and `down`; waiting in vain for a lost node counts as one more.
    """

    useful_s: float
    badput_s: dict[str, float]
    paused_s: float
    rehearsed_s: float
    times: dict[str, int]

    @property
    def wall_s(self) -> float:
        """Seconds of the run."""
        return self.useful_s + sum(self.badput_s.values())

    @property
    def goodput(self) -> float | None:
        """The share of useful seconds, 0 to 1."""
        return self.useful_s / self.wall_s if self.wall_s > 0 else None


def time_spent(events: Events, trained: StepColumns, now_s: float | None = None) -> TimeSpent | None:
    """None before the first generation, and for a script whose steps are its own.

    now_s: where the run goes on, seconds since 1970.
    """
    starts = of_kind(events, kinds.GenerationStarted)
    if not starts or starts[-1].event.plain:
        return None
    own, steps = by_generation(events), trained.counted
    seen_s = {generation: last_seen_s(each) for generation, each in own.items()}
    badput_s: dict[str, float] = defaultdict(float)
    times = Counter(each.event.cause for each in starts)
    paused_s = 0.0
    for start, after in zip_longest(starts, starts[1:]):
        last_s = last_sign_s(start, steps.get(start.generation), seen_s)
        until = max(last_s, now_s or 0.0) if after is None else after.time
        away_s = 0.0
        if after is None and (left := left_as_planned(own[start.generation], start)) is not None:
            away_s = max(0.0, until - left.time)
            paused_s += away_s
        if after is not None:
            between = [*own[start.generation], *own[after.generation]]
            if (since_s := down_since_s(start, after, between, last_s)) is not None:
                away_s = until - since_s
                badput_s[DOWN] += away_s
                times[DOWN] += 1
            elif (stop := planned_stop(between, start, after)) is not None:
                away_s = max(0.0, until - stop.time)
                paused_s += away_s
        then = _next(after, own[start.generation])
        times[NODE_LOST] += then == NODE_LOST and (after is None or after.event.cause != NODE_LOST)
        for kind, seconds in _lost_s(start, then, steps, until - away_s):
            badput_s[kind] += max(0.0, seconds)
    rehearsed_s, times[REHEARSAL] = max(0.0, badput_s.pop(REHEARSAL, 0.0)), 0
    return TimeSpent(
        rehearsed_s=rehearsed_s,
        useful_s=sum(each.seconds for each in steps.values()),
        badput_s={kind: seconds for kind, seconds in badput_s.items() if seconds > 0},
        paused_s=paused_s,
        times={kind: number for kind, number in times.items() if number},
    )


def _next(after: Start | None, events: Events) -> str:
    """What the time behind the last step of a generation goes to. events: its own."""
    then = END if after is None else after.event.cause
    if then in (END, "resume") and ended_by_loss(events) is not None:
        return NODE_LOST  # for which the others waited, in vain or up to now
    return then


def _lost_s(
    start: Start, then: str, steps: Mapping[int, GenerationSteps], until: float
) -> list[tuple[str, float]]:
    """Where a generation's time went, up to the next one or the end. then: as `_next` says."""
    own = steps.get(start.generation)
    if own is None:  # none of its steps counts: it was a part of the way to the next
        return [(start.event.cause if then == END else then, until - start.time)]
    return [
        (start.event.cause, own.begin - start.time),
        (BETWEEN_STEPS, own.end - own.begin - own.seconds),
        (then, until - own.end),
    ]
