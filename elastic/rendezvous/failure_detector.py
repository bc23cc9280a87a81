"""A node is alive as long as its counter moved within `keep_alive_s` of the observer's own attention; no two clocks are compared.

Silence grows by at most a quarter of `keep_alive_s` per look, so an observer that was itself stopped or starved must
look several times before it may call anybody dead. It does not promise to be right: a node taken for dead may only be
slow, and the generation number fences it then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

NEVER_BEATEN = -1
LOOKS_UNTIL_DEAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    counter: int
    silence_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """What one observer has seen so far; start with an empty one."""

    keep_alive_s: float
    looked_s: float | None = None
    pulses: Mapping[str, Pulse] = field(default_factory=dict)

    def look(self, counters: Mapping[str, int], *, now_s: float, counts: bool = True) -> "Liveness":
        """`counters`: of every node of interest; NEVER_BEATEN for one without. Nodes not named are forgotten.

        counts: False while nobody's silence means anything, because this node cannot beat itself.
        """
        cap_s = self.keep_alive_s / LOOKS_UNTIL_DEAD if counts else 0.0
        elapsed_s = 0.0 if self.looked_s is None else min(now_s - self.looked_s, cap_s)
        pulses = {node_id: self._pulse(node_id, count, elapsed_s) for node_id, count in counters.items()}
        return Liveness(keep_alive_s=self.keep_alive_s, looked_s=now_s, pulses=pulses)

    def _pulse(self, node_id: str, counter: int, elapsed_s: float) -> Pulse:
        last = self.pulses.get(node_id)
        # A beat that is missing for a moment, while its file is replaced or cleaned, is silence and not a new life.
        if last is not None and counter in (last.counter, NEVER_BEATEN):
            return Pulse(counter=last.counter, silence_s=last.silence_s + elapsed_s)
        return Pulse(counter=counter, silence_s=0.0)

    @property
    def alive(self) -> frozenset[str]:
        """Ids of the nodes whose silence is not longer than `keep_alive_s`; a node seen for the first time is alive."""
        return frozenset(i for i, pulse in self.pulses.items() if pulse.silence_s <= self.keep_alive_s)
