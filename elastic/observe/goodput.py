"""Where a run's time went: into steps that count, or what it was lost to. No part is negative.

The time is that from the first generation's start to the last sign of life, or to now where the run
goes on. A planned stop of the whole run is not part of that time, a crash of all nodes is: the user
chose the one, the other is what goodput is there to show. The rest is divided at marks in each
generation, its first and its last step that counts, and the parts make up the whole:

    start ── its cause ──> first step ── between steps ──> last step ── next cause ──> next start

It does not promise precision across nodes: each event carries the clock of the node that wrote it.
Where a clock was set back, a part that would be negative counts as nothing.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

from elastic import events as kinds
from elastic.observe.logged_event import Events, by_generation, of_kind
from elastic.observe.recovery import NODE_LOST, Start, ended_by_loss, left_as_planned, planned_stop
from elastic.observe.step_columns import GenerationSteps, StepColumns

BETWEEN_STEPS = "between steps"
DOWN = "down"
END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """useful_s: seconds in steps that count. paused_s: those of planned stops, which are no part of
    the run's time.

    badput_s: the others, by what they went to. The cause of a generation (start, failure, node
    lost, node joined, node left, resume) has the time from the last step that counts before it to
    the first one in it: steps that were lost, detection, rendezvous, restore. `down` is that in
    which no node was left, from the last sign of life to the command that resumed; nodes that wait
    for one that was lost lose their time to that. `between steps`
    has saves, calls of `run.evaluate` and what else stops the loop there, but not what the body of
    a step does by itself; `end` what follows the last step.
    """

    useful_s: float
    badput_s: dict[str, float]
    paused_s: float

    @property
    def wall_s(self) -> float:
        """Seconds of the run."""
        return self.useful_s + sum(self.badput_s.values())

    @property
    def goodput(self) -> float | None:
        """The share of useful seconds, 0 to 1."""
        return self.useful_s / self.wall_s if self.wall_s > 0 else None


def time_spent(events: Events, trained: StepColumns, now_s: float | None = None) -> TimeSpent | None:
    """None before the first generation. now_s: where the run goes on, seconds since 1970."""
    seen_s = {generation: last_seen_s(own) for generation, own in by_generation(events).items()}
    return time_spent_in(events, trained.counted, seen_s, now_s)


def last_seen_s(own: Events) -> float:
    """own: events of one generation, in order. By each node's clock as it was at last."""
    return max({each.node: each.time for each in own}.values())


def time_spent_in(
    events: Events,
    steps: Mapping[int, GenerationSteps],
    seen_s: Mapping[int, float],
    now_s: float | None = None,
) -> TimeSpent | None:
    """The same where steps were added up as they came.

    events: at least those of generations that start, restore and end, and of agents that leave.
    seen_s: by generation, the time of its last event of any kind.
    """
    starts = of_kind(events, kinds.GenerationStarted)
    if not starts:
        return None
    own = by_generation(events)
    badput_s: dict[str, float] = defaultdict(float)
    paused_s = 0.0
    for start, after in zip_longest(starts, starts[1:]):
        last_s = last_sign_s(start, steps.get(start.generation), seen_s)
        until = max(last_s, now_s or 0.0) if after is None else after.time
        away_s = 0.0
        if after is None and (left := left_as_planned(own[start.generation], start)) is not None:
            away_s = max(0.0, until - left.time)
            paused_s += away_s
        if after is not None and after.event.cause == "resume":
            last_s = max([last_s, *lost_steps_s(own[after.generation])])
            stop = planned_stop(own[start.generation], start, after)
            away_s = max(0.0, until - (last_s if stop is None else stop.time))
            if stop is None:
                badput_s[DOWN] += away_s
            else:
                paused_s += away_s
        for kind, seconds in _lost_s(start, after, own[start.generation], steps, until - away_s):
            badput_s[kind] += max(0.0, seconds)
    return TimeSpent(
        useful_s=sum(each.seconds for each in steps.values()),
        badput_s={kind: seconds for kind, seconds in badput_s.items() if seconds > 0},
        paused_s=paused_s,
    )


def last_sign_s(start: Start, own: GenerationSteps | None, seen_s: Mapping[int, float]) -> float:
    """When something of the generation was seen last: an event, or a step that counts."""
    seen = seen_s.get(start.generation, start.time)
    return max(seen, start.time if own is None else own.end)


def lost_steps_s(after: Events) -> list[float]:
    """When the last step ended before all nodes were gone, whose line is gone where it was lost.

    after: events of the generation that resumed.
    """
    ended_s = [each.event.last_step_s for each in of_kind(after, kinds.Restored)]
    return [each for each in ended_s if each is not None]


def _lost_s(
    start: Start, after: Start | None, events: Events, steps: Mapping[int, GenerationSteps], until: float
) -> list[tuple[str, float]]:
    """Of one generation, up to the next one or the end. events: its own."""
    own = steps.get(start.generation)
    if own is None:  # none of its steps counts: it was a part of the way to the next
        return [(start.event.cause if after is None else after.event.cause, until - start.time)]
    then = END if after is None else after.event.cause
    if then in (END, "resume") and ended_by_loss(events) is not None:
        then = NODE_LOST  # for which the others waited, in vain or up to now
    return [
        (start.event.cause, own.begin - start.time),
        (BETWEEN_STEPS, own.end - own.begin - own.seconds),
        (then, until - own.end),
    ]
