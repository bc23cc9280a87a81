"""Where a run's time went: into steps that count, or what it was lost to. No part is negative.

The time is that from the first generation's start to the last sign of life, or to now where the run
goes on. A planned stop of the whole run is not part of that time, a crash of all nodes is: the user
chose the one, the other is what goodput is there to show. The rest is divided at marks in each
generation, its first and its last step that counts, and the parts make up the whole:

    start ── its cause ──> first step ── between steps ──> last step ── next cause ──> next start

Times are those of the nodes' clocks, which agree to within a second or so: a part that would be
negative counts as nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.observe.generations import DOWN, NODE_LOST, REHEARSAL, Generation, ended_by_loss

BETWEEN_STEPS = "between steps"
END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """useful_s: seconds in steps that count. paused_s: those of planned stops, which are no part of
    the run's time; nor are those of rehearsals.

    badput_s: the others, by what they went to. The cause of a generation (start, failure, node
    lost, node joined, node left, resume) has the time from the last step that counts before it to
    the first one in it: steps that were lost, detection, rendezvous, restore. `down` is that in
    which no node was left, from the last sign of life to the command that resumed; nodes that wait
    for a lost node lose their time to that. `between steps` has saves, calls of `run.evaluate` and
    what else stops the loop there, but not what the body of a step does by itself; `end` what
    follows the last step.
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


def time_spent(generations: Sequence[Generation]) -> TimeSpent | None:
    """None before the first generation, and for a script whose steps are its own."""
    if not generations or generations[-1].start.event.plain:
        return None
    badput_s: dict[str, float] = defaultdict(float)
    useful_s = paused_s = 0.0
    for each in generations:
        away_s = max(0.0, each.until_s - each.ends_s)
        if each.gap == DOWN:
            badput_s[DOWN] += away_s
        else:
            paused_s += away_s
        useful_s += each.useful_s
        # What the time behind the last step goes to. In the second case the others waited for the
        # node, in vain or up to now.
        then = END if each.after is None else each.after.event.cause
        if then in (END, "resume") and ended_by_loss(each.own) is not None:
            then = NODE_LOST
        if each.trains_s is None or each.trained_s is None:
            # None of its steps counts: it was a part of the way to the next.
            lost_s = [(each.cause if then == END else then, each.ends_s - each.begins_s)]
        else:
            lost_s = [
                (each.cause, each.trains_s - each.begins_s),
                (BETWEEN_STEPS, each.trained_s - each.trains_s - each.useful_s),
                (then, each.ends_s - each.trained_s),
            ]
        for kind, seconds in lost_s:
            badput_s[kind] += max(0.0, seconds)
    badput_s[REHEARSAL] = 0.0  # for a comparison, which is no lost time
    lost = {kind: seconds for kind, seconds in badput_s.items() if seconds > 0}
    return TimeSpent(useful_s=useful_s, badput_s=lost, paused_s=paused_s)
