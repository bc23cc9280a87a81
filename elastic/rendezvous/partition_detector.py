"""A node that answers in the group but is out of reach of its peers is set apart, and comes back once it is heard again.

Silence between two nodes is judged later than silence in the group, so that a node that is simply gone is evicted and nobody complains. Where calls come through to nobody, as behind a
firewall, nothing is known and nobody complains. It does not promise that a path which carries calls carries everything.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from elastic.rendezvous import transitions
from elastic.rendezvous.failure_detector import NEVER_BEATEN, Liveness
from elastic.rendezvous.group import Group, Node

SILENT_AFTER = 1.5  # of a keep-alive
SETTLED_AFTER = 0.25  # of a keep-alive: so long the first complaint waits for the others'
HEARD_WITHIN = 0.5


class Hears(Protocol):
    def know(self, nodes: Iterable[Node]) -> None: ...

    @property
    def counters(self) -> Mapping[str, int]:
        """Of each node that was heard both ways: how often."""


class Hearing:
    def __init__(self, calls: Hears, keep_alive_s: float) -> None:
        self._calls = calls
        self._keep_alive_s = keep_alive_s
        self._pulses = Liveness(keep_alive_s=keep_alive_s * SILENT_AFTER)
        self._divided_s: float | None = None

    def look(self, group: Group, *, now_s: float) -> None:
        """Bring up to date who is heard; `group` says whom to call."""
        nodes = {node.id: node for node in (*group.waiting, *group.members)}
        self._calls.know(nodes.values())
        counters = self._calls.counters
        # One that is set apart leaves the group for a moment, until it has stopped its workers: that is no reason to forget its silence.
        names = {name for name, node in nodes.items() if node.port} | transitions.parted(group)
        self._pulses = self._pulses.look(
            {name: counters.get(name, NEVER_BEATEN) for name in names}, now_s=now_s
        )
        if not group.open:
            self._divided_s = None

    def tell(self, group: Group, *, me: str, alive: AbstractSet[str]) -> Group:
        """The group after this node has said whom it does not hear now."""
        return transitions.complain(group, node_id=me, unheard=self._unheard(group, me, alive))

    def judge(self, group: Group, *, me: str, alive: AbstractSet[str], step: int, now_s: float) -> Group:
        """The same, and closed once members have complained of each other for so long that all have had time to say it."""
        told = self.tell(group, me=me, alive=alive)
        if not transitions.is_divided(group, alive=alive):
            self._divided_s = None
            return told
        if self._divided_s is None:
            self._divided_s = now_s
        is_settled = now_s - self._divided_s >= self._keep_alive_s * SETTLED_AFTER
        return transitions.divide(told, alive=alive, step=step) if is_settled else told

    def _unheard(self, group: Group, me: str, alive: AbstractSet[str]) -> tuple[str, ...]:
        before = [
            name for complaint in group.complaints if complaint.node == me for name in complaint.unheard
        ]
        known = dict.fromkeys([*(node.id for node in (*group.members, *group.waiting)), *before])
        others = [name for name in known if name != me and name in alive and name in self._pulses.pulses]
        heard = self._heard
        # One that was never heard may have no way for calls at all, unless they come through from elsewhere.
        met = {name for name in others if heard or self._pulses.pulses[name].counter != NEVER_BEATEN}
        silent = met - self._pulses.alive
        # Between the two limits a complaint stands if it was made.
        return tuple(name for name in others if name in silent or (name in before and name not in heard))

    @property
    def _heard(self) -> frozenset[str]:
        """Those who were heard both ways a moment ago."""
        limit_s = self._keep_alive_s * HEARD_WITHIN
        pulses = self._pulses.pulses.items()
        return frozenset(i for i, p in pulses if p.counter != NEVER_BEATEN and p.silence_s <= limit_s)
