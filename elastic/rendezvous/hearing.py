"""A node that answers in the group but is out of reach of its peers is set apart, and comes back once it is heard again.

Silence between two nodes is judged later than silence in the group, so that a node that is simply gone is evicted and nobody complains. Where calls come through to nobody, as behind a
firewall, nothing is known and nobody complains. It does not promise that a path which carries calls carries everything.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from elastic.rendezvous import core
from elastic.rendezvous.liveness import NEVER_BEATEN, Liveness
from elastic.rendezvous.membership import Group, Node

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
        self._complained_s: float | None = None

    def look(self, group: Group, *, now_s: float) -> None:
        """Bring up to date who is heard; `group` says whom to call."""
        nodes = {node.id: node for node in (*group.waiting, *group.members)}
        self._calls.know(nodes.values())
        callable_ids = {name for name, node in nodes.items() if node.port} | set(group.apart)
        counters = self._calls.counters
        self._pulses = self._pulses.look(
            {name: counters.get(name, NEVER_BEATEN) for name in callable_ids}, now_s=now_s
        )
        if not group.complaints:
            self._complained_s = None
        elif self._complained_s is None:
            self._complained_s = now_s

    @property
    def heard(self) -> frozenset[str]:
        """Those who were heard both ways a moment ago."""
        limit_s = self._keep_alive_s * HEARD_WITHIN
        pulses = self._pulses.pulses.items()
        return frozenset(i for i, p in pulses if p.counter != NEVER_BEATEN and p.silence_s <= limit_s)

    def judge(
        self, group: Group, *, generation: int, me: str, alive: AbstractSet[str], step: int, now_s: float
    ) -> Group:
        """The group after this node has said whom it does not hear, welcomed whom it hears again, and, once all have had time to say the same, set apart who is cut off."""
        unheard = self._unheard(group, me, alive)
        told = core.complain(group, generation=generation, node_id=me, unheard=unheard)
        told = core.welcome_back(told, node_id=me, heard=self.heard)
        settled_s = self._keep_alive_s * SETTLED_AFTER
        if self._complained_s is None or now_s - self._complained_s < settled_s:
            return told
        return core.set_apart(told, alive=alive, step=step)

    def _unheard(self, group: Group, me: str, alive: AbstractSet[str]) -> tuple[str, ...]:
        others = [node.id for node in group.members if node.id != me and node.id in alive]
        silent = [i for i in others if i in self._pulses.pulses and i not in self._pulses.alive]
        heard = self.heard
        return tuple(
            i
            for i in silent
            # One that was never heard may have no way for calls at all, unless they come through from elsewhere.
            if self._pulses.pulses[i].counter != NEVER_BEATEN or any(other in heard for other in others)
        )
