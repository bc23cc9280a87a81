"""A node that comes and goes without a new step waits longer each time it comes back, and nodes
that come together are let in together.

Each admission costs the whole group a drain and a rendezvous. Without a backoff, one broken machine
that is restarted for ever would stop the others again and again. Visits are remembered by a node's
address, because each new process has another id. No node is excluded: after LONGEST_S it is
admitted, and one new step in a generation clears all members of that generation. A member that
leaves as planned waits once: it was told to go, and what told it may change its mind every few
seconds.

Without a join window, a thousand machines that start within a minute would drain the group one by
one.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from elastic.rendezvous.group import Node

FIRST_S = 2.0
LONGEST_S = 300.0
# A drain waits for nodes that keep coming for so many join windows at most.
WINDOWS_AT_MOST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinBackoff:
    """What one agent has seen of the nodes that came and went; start with an empty one."""

    members: tuple[Node, ...] = ()  # of the newest generation
    high_step: int = 0
    visits: Mapping[str, int] = field(default_factory=dict)  # by address: consecutive, without a new step
    since_s: Mapping[str, float] = field(default_factory=dict)  # by node id: waiting to join

    def entered(self, members: tuple[Node, ...], *, step: int, is_planned: bool = False) -> "RejoinBackoff":
        """A new generation has these members.

        step: the last of the one before, 0 for none. is_planned: those that are missing were not
        lost, but left.
        """
        ids = {node.id for node in members}
        visits = dict(self.visits)
        for node in self.members:
            if step > self.high_step:
                visits.pop(node.address, None)
        for node in self.members:
            if node.id not in ids and (is_planned or step <= self.high_step):
                visits[node.address] = visits.get(node.address, 0) + 1
        return RejoinBackoff(members=members, high_step=max(step, self.high_step), visits=visits)

    def observe(self, newcomers: Collection[Node], *, now_s: float) -> "RejoinBackoff":
        """These nodes wait to join. A node that stopped waiting in between starts again from 0."""
        if not newcomers and not self.since_s:
            return self
        return replace(self, since_s={node.id: self.since_s.get(node.id, now_s) for node in newcomers})

    def admits(
        self,
        newcomers: Collection[Node],
        *,
        now_s: float,
        window_s: float = 0.0,
        max_nodes: int | None = None,
    ) -> bool:
        """Whether the group is to drain for them now; one drain admits all that wait.

        It is, once a node has waited for its backoff and no other one's has ended for `window_s`.
        A node that fills the group up to `max_nodes` is the last that could come.
        """
        ready_s = [self.since_s.get(node.id, now_s) + self.wait_s(node.address) for node in newcomers]
        ready_s = [at_s for at_s in ready_s if at_s <= now_s]
        if not ready_s or len(self.members) + len(newcomers) == max_nodes:
            return bool(ready_s)
        return now_s - max(ready_s) >= window_s or now_s - min(ready_s) >= window_s * WINDOWS_AT_MOST

    def wait_s(self, address: str) -> float:
        """0 for a node that never came or last brought a new step; each other visit doubles it."""
        visits = self.visits.get(address, 0)
        return min(FIRST_S * 2.0 ** (min(visits, 32) - 1), LONGEST_S) if visits else 0.0
