"""Every link between two members is tried again and again, a few links at a time.

In a wide group a node probes a bounded number of others all the time (`probe_graph`). A single
broken link may lie between two nodes that do not: nothing else is wrong with either of them, and
every sum that uses the link stands still. So each member asks the members that it does not probe
for one answer each, one after another; a member that does not answer is asked until it does, or
until the detector reports it.

It promises no short time: a whole turn takes (members - 17) / 8 keep-alive periods. Both ends of
a link try it, so that a broken one is found after a third of that on average.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence

from elastic.rendezvous.probe_graph import place

AT_ONCE = 2
TURNS_PER_KEEP_ALIVE = 4


class LinkSweep:
    """`asked`: the members that have been asked and have not answered yet."""

    def __init__(self, me: str, keep_alive_s: float) -> None:
        self.asked: tuple[str, ...] = ()
        self._every_s = keep_alive_s / TURNS_PER_KEEP_ALIVE
        self._due_s: float | None = None
        self._last = place(me)

    def advance(self, others: Sequence[str], answered: Collection[str], *, now_s: float) -> None:
        """others: those to try, in the order of the ring. answered: those that answered by now."""
        asked = [name for name in self.asked if name in others and name not in answered]
        if self._due_s is None or now_s >= self._due_s:
            self._due_s = now_s + self._every_s
            while len(asked) < min(AT_ONCE, len(others)):
                asked.append(self._next(others, asked))
        self.asked = tuple(asked)

    def _next(self, others: Sequence[str], asked: Collection[str]) -> str:
        start = bisect_right(others, self._last, key=place)
        name = next(each for each in (*others[start:], *others[:start]) if each not in asked)
        self._last = place(name)
        return name
