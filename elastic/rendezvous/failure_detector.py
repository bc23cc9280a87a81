"""A node is alive while its heartbeat counter moves within `keep_alive_s` of its observer's time.

No two clocks are compared: each observer judges by its own monotonic clock, and by changes of a
counter, never by its value. `elastic.system.silence` says why an observer that was itself stopped
does not take the others for dead at once.

It does not promise to be right: a node taken for dead may only be slow. The generation number
fences it then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.system.silence import attended_s

NO_HEARTBEAT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """has_moved: its counter has changed since it first had a number."""

    counter: int
    silence_s: float = 0.0
    has_moved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureDetector:
    """What one observer has seen so far; start with an empty one."""

    keep_alive_s: float
    observed_s: float | None = None
    nodes: Mapping[str, NodeHistory] = field(default_factory=dict)

    def observe(self, counters: Mapping[str, int], *, now_s: float, counts: bool = True) -> "FailureDetector":
        """One poll. `counters`: of every node of interest, NO_HEARTBEAT for a node without one.

        Nodes that are not named are forgotten. counts: False while this node cannot send heartbeats
        itself, because the silence of the others then means nothing.
        """
        elapsed_s = 0.0 if self.observed_s is None or not counts else now_s - self.observed_s
        nodes = {node_id: self._history(node_id, count, elapsed_s) for node_id, count in counters.items()}
        return FailureDetector(keep_alive_s=self.keep_alive_s, observed_s=now_s, nodes=nodes)

    def _history(self, node_id: str, counter: int, elapsed_s: float) -> NodeHistory:
        last = self.nodes.get(node_id)
        # A heartbeat may be missing for a moment, while its file is being replaced or cleaned up.
        # That is silence. If it counted as a change, a dead node would seem alive twice: when its
        # heartbeat vanishes and when it is back.
        if last is not None and counter in (last.counter, NO_HEARTBEAT):
            silence_s = last.silence_s + attended_s(elapsed_s, limit_s=self.keep_alive_s)
            return NodeHistory(counter=last.counter, silence_s=silence_s, has_moved=last.has_moved)
        has_moved = last is not None and (last.has_moved or last.counter != NO_HEARTBEAT)
        return NodeHistory(counter=counter, has_moved=has_moved)

    @property
    def alive(self) -> frozenset[str]:
        """The nodes whose silence is at most `keep_alive_s`; a node that is new here is alive."""
        return frozenset(name for name, node in self.nodes.items() if node.silence_s <= self.keep_alive_s)

    @property
    def moving(self) -> frozenset[str]:
        """The live nodes that have shown that they are: their counters have moved."""
        return frozenset(node_id for node_id in self.alive if self.nodes[node_id].has_moved)
