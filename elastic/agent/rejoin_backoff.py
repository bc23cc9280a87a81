"""A node that came, brought no new step and went is waited for longer each time, so that a broken machine does not stop the others again and again.

What it remembers goes by a node's address, because each process has another id. It does not keep anybody out: who stays long enough is let in, and a generation
that finishes one new step clears its members.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from elastic.rendezvous.group import Node

FIRST_S = 2.0
LONGEST_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinBackoff:
    """What one member has seen; start with an empty one."""

    members: tuple[Node, ...] = ()  # of the newest generation
    high_step: int = 0
    visits: Mapping[str, int] = field(default_factory=dict)  # by address: in a row, without a new step
    since_s: Mapping[str, float] = field(default_factory=dict)  # by node id: waiting to join

    def entered(self, members: tuple[Node, ...], *, step: int) -> "RejoinBackoff":
        """A new generation has these members; `step` is the last that the one before it finished, 0 if none."""
        ids = {node.id for node in members}
        visits = dict(self.visits)
        for node in self.members:
            if step > self.high_step:
                visits.pop(node.address, None)
            elif node.id not in ids:
                visits[node.address] = visits.get(node.address, 0) + 1
        return RejoinBackoff(members=members, high_step=max(step, self.high_step), visits=visits)

    def observe(self, newcomers: Collection[Node], *, now_s: float) -> "RejoinBackoff":
        """These nodes could be let in."""
        return replace(self, since_s={node.id: self.since_s.get(node.id, now_s) for node in newcomers})

    def admits(self, newcomers: Collection[Node], *, now_s: float) -> bool:
        """Whether one of them has waited for as long as its address must; the others come along."""
        return any(
            now_s - self.since_s.get(node.id, now_s) >= self.wait_s(node.address) for node in newcomers
        )

    def wait_s(self, address: str) -> float:
        """0 for whoever brought a new step, or never was here."""
        visits = self.visits.get(address, 0)
        return min(FIRST_S * 2.0 ** (min(visits, 32) - 1), LONGEST_S) if visits else 0.0
