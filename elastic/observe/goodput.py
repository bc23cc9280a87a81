"""Where a run's time went: into steps that count, or what it was lost to. No part is negative.

The time is that from the first generation's start to the last event or step. A planned stop of the
whole run is not part of that time, a crash of all nodes is: the user chose the one, the other is
what goodput is there to show. The rest is divided at marks in each generation, its first and its
last step that counts, so that the parts add up to the whole where the nodes' clocks agree:

    start ── its cause ──> first step ── between steps ──> last step ── next cause ──> next start

It does not promise precision across nodes: each event carries the clock of the node that wrote it.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

from elastic import events as kinds
from elastic.observe.logged_event import Events, by_generation, of_kind
from elastic.observe.recovery import Start, planned_stop
from elastic.observe.step_columns import GenerationSteps, StepColumns

BETWEEN_STEPS = "between steps"
END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """wall_s: seconds of the run. useful_s: those in steps that count.

    badput_s: the others, by what they went to. The cause of a generation (start, failure, node
    lost, node joined, node left, resume) has the time from the last step that counts before it to
    the first one in it: steps that were lost, detection, rendezvous, restore. `between steps` has
    evaluations, saves and what else the loop does there; `end` what follows the last step.
    """

    wall_s: float
    useful_s: float
    badput_s: dict[str, float]

    @property
    def goodput(self) -> float | None:
        # Steps that claim more time than passed come from clocks that disagree.
        return min(1.0, self.useful_s / self.wall_s) if self.wall_s > 0 else None


def time_spent(events: Events, trained: StepColumns) -> TimeSpent | None:
    """None before the first generation."""
    newest_s = max((each.time for each in events), default=0.0)
    return time_spent_in(events, trained.counted, newest_s)


def time_spent_in(events: Events, steps: Mapping[int, GenerationSteps], newest_s: float) -> TimeSpent | None:
    """The same where steps were added up as they came.

    events: at least those of generations that start, and of agents that leave. newest_s: the time
    of the newest event of any kind.
    """
    starts = of_kind(events, kinds.GenerationStarted)
    if not starts:
        return None
    own = by_generation(events)
    end = max([newest_s, *(each.end for each in list(steps.values())[-1:])])
    badput_s: dict[str, float] = defaultdict(float)
    pauses_s = 0.0
    for start, after in zip_longest(starts, starts[1:]):
        pause_s = 0.0 if after is None else _pause_s(own[start.generation], start, after)
        pauses_s += pause_s
        until = end if after is None else after.time
        for kind, seconds in _lost_s(start, after, steps, until - pause_s):
            badput_s[kind] += max(0.0, seconds)
    return TimeSpent(
        wall_s=end - starts[0].time - pauses_s,
        useful_s=sum(each.seconds for each in steps.values()),
        badput_s={kind: seconds for kind, seconds in badput_s.items() if seconds > 0},
    )


def _lost_s(
    start: Start, after: Start | None, steps: Mapping[int, GenerationSteps], until: float
) -> list[tuple[str, float]]:
    """Of one generation, up to the next one or the end."""
    own = steps.get(start.generation)
    if own is None:  # none of its steps counts: it was a part of the way to the next
        return [(start.event.cause if after is None else after.event.cause, until - start.time)]
    return [
        (start.event.cause, own.begin - start.time),
        (BETWEEN_STEPS, own.end - own.begin - own.seconds),
        (END if after is None else after.event.cause, until - own.end),
    ]


def _pause_s(own: Events, before: Start, after: Start) -> float:
    """How long the run lay still between a planned stop and the generation that resumed it.

    own: events of the generation before.
    """
    stop = planned_stop(own, before, after)
    return 0.0 if stop is None else max(0.0, after.time - stop.time)
