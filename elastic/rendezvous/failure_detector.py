"""A node is alive as long as its counter moved within `keep_alive_s` of the observer's own attention; no two clocks are compared.

Silence grows by at most a quarter of `keep_alive_s` per look, so an observer that was itself stopped or starved must
look several times before it may call anybody dead. It does not promise to be right: a node taken for dead may only be
slow, and the generation number fences it then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_HEARTBEAT = -1
LOOKS_UNTIL_DEAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    counter: int
    silence_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureDetector:
    """What one observer has seen so far; start with an empty one."""

    keep_alive_s: float
    observed_s: float | None = None
    nodes: Mapping[str, NodeHistory] = field(default_factory=dict)

    def observe(self, counters: Mapping[str, int], *, now_s: float, counts: bool = True) -> "FailureDetector":
        """`counters`: of every node of interest; NO_HEARTBEAT for one without. Nodes not named are forgotten.

        counts: False while nobody's silence means anything, because this node cannot beat itself.
        """
        cap_s = self.keep_alive_s / LOOKS_UNTIL_DEAD if counts else 0.0
        elapsed_s = 0.0 if self.observed_s is None else min(now_s - self.observed_s, cap_s)
        nodes = {node_id: self._pulse(node_id, count, elapsed_s) for node_id, count in counters.items()}
        return FailureDetector(keep_alive_s=self.keep_alive_s, observed_s=now_s, nodes=nodes)

    def _pulse(self, node_id: str, counter: int, elapsed_s: float) -> NodeHistory:
        last = self.nodes.get(node_id)
        # A beat that is missing for a moment, while its file is replaced or cleaned, is silence and not a new life.
        if last is not None and counter in (last.counter, NO_HEARTBEAT):
            return NodeHistory(counter=last.counter, silence_s=last.silence_s + elapsed_s)
        return NodeHistory(counter=counter, silence_s=0.0)

    @property
    def alive(self) -> frozenset[str]:
        """Ids of the nodes whose silence is not longer than `keep_alive_s`; a node seen for the first time is alive."""
        return frozenset(i for i, pulse in self.nodes.items() if pulse.silence_s <= self.keep_alive_s)
