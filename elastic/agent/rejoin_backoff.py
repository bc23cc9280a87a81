"""A node that joined and went without a new step waits longer each time it comes back.

Each admission costs the whole group a drain and a rendezvous: without a backoff, one broken machine
that is restarted for ever would stop the others again and again. Visits are remembered by a node's
address, because each new process has another id. No node is excluded: after LONGEST_S it is
admitted, and one new step in a generation clears all members of that generation.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from elastic.rendezvous.group import Node

FIRST_S = 2.0
LONGEST_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinBackoff:
    """What one agent has seen of the nodes that came and went; start with an empty one."""

    members: tuple[Node, ...] = ()  # of the newest generation
    high_step: int = 0
    visits: Mapping[str, int] = field(default_factory=dict)  # by address: consecutive, without a new step
    since_s: Mapping[str, float] = field(default_factory=dict)  # by node id: waiting to join

    def entered(self, members: tuple[Node, ...], *, step: int) -> "RejoinBackoff":
        """A new generation has these members. step: the last of the one before, 0 for none."""
        ids = {node.id for node in members}
        visits = dict(self.visits)
        for node in self.members:
            if step > self.high_step:
                visits.pop(node.address, None)
            elif node.id not in ids:
                visits[node.address] = visits.get(node.address, 0) + 1
        return RejoinBackoff(members=members, high_step=max(step, self.high_step), visits=visits)

    def observe(self, newcomers: Collection[Node], *, now_s: float) -> "RejoinBackoff":
        """These nodes wait to join. A node that stopped waiting in between starts again from 0."""
        return replace(self, since_s={node.id: self.since_s.get(node.id, now_s) for node in newcomers})

    def admits(self, newcomers: Collection[Node], *, now_s: float) -> bool:
        """Whether one has waited for its backoff; one drain admits the others with it."""
        return any(
            now_s - self.since_s.get(node.id, now_s) >= self.wait_s(node.address) for node in newcomers
        )

    def wait_s(self, address: str) -> float:
        """0 for a node that never came or last brought a new step; each other visit doubles it."""
        visits = self.visits.get(address, 0)
        return min(FIRST_S * 2.0 ** (min(visits, 32) - 1), LONGEST_S) if visits else 0.0
