"""Agents inject the faults of a plan that hit a node, each at most once, and the random kills.

No agent needs a message for a random kill. Each draws the times and the victims of all kills from
the seed, from its own start on, and kills those that are its own workers. So it does not matter
which agent dies, and agents that begin at different times kill at different times.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from elastic.events import FaultInjected
from elastic.faults.inject import Claims, pause
from elastic.faults.plan import NODE, At, AtIntervals, Fault, Kind, unreached
from elastic.observe.log import EventLog
from elastic.rendezvous.rendezvous import Generation
from elastic.system.clock import Clock
from elastic.system.processes import children


class NodeFaults:
    """Of `faults`, those whose triggers only an agent sees."""

    def __init__(self, faults: tuple[Fault, ...], claims: Claims, log: EventLog, clock: Clock) -> None:
        self._faults = faults
        self._claims = claims
        self._log = log
        self._repeated = [
            RandomKills(fault, fault.trigger, claims, clock)
            for fault in faults
            if isinstance(fault.trigger, AtIntervals)
        ]

    def poll(self, generation: Generation, step: int, workers: Mapping[int, int]) -> None:
        """Inject the faults that are due.

        step: the last that all workers of this node finished, 0 for none.

        workers: the pids of the running ones, by rank.
        """
        for fault in self._faults:
            due = fault.trigger
            is_here = isinstance(due, At) and (due.point, due.who) == (NODE, generation.rank_of_node)
            if isinstance(due, At) and is_here and due.number <= step and self._claims.take(fault):
                self._inject(fault, step)
        for kills in self._repeated:
            if (victim := kills.poll(generation.world_size, workers)) is not None:
                self._log.record(FaultInjected(fault=kills.fault.text, step=step))
                _kill(victim)

    def unreached(self, last_step: int) -> list[str]:
        """Which faults have struck nothing, in words."""
        return unreached([each for each in self._faults if not self._claims.is_taken(each)], last_step)

    def _inject(self, fault: Fault, step: int) -> None:
        self._log.record(FaultInjected(fault=fault.text, step=step))
        match fault.kind:
            case Kind.PAUSE:
                pause(_with_descendants(os.getpid()), fault.amount)
            case Kind.TERMINATE:
                os.kill(os.getpid(), signal.SIGTERM)
            case _:
                _kill(os.getpid())


@dataclass
class RandomKills:
    """Those of one line of the plan that this agent carries out."""

    fault: Fault
    every: AtIntervals
    claims: Claims
    clock: Clock
    kills: int = 0

    def __post_init__(self) -> None:
        self.since_s = self.clock.monotonic()

    def poll(self, world_size: int, workers: Mapping[int, int]) -> int | None:
        """The pid that this agent is to kill now, if any."""
        now_s = self.clock.monotonic()
        if now_s - self.since_s < self.every.wait_s(self.kills):
            return None
        victim = workers.get(self.every.pick(self.kills, world_size))
        self.kills, self.since_s = self.kills + 1, now_s
        # The claim says at the end of the run that the line struck; it may have been taken before.
        is_claimed = victim is not None and (self.claims.is_taken(self.fault) or self.claims.take(self.fault))
        return victim if is_claimed else None


def _kill(pid: int) -> None:
    """SIGKILL; to this process itself with all that it started, as if the node were lost."""
    for each in reversed(_with_descendants(pid) if pid == os.getpid() else [pid]):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _with_descendants(root: int) -> list[int]:
    """The pids of a process and all its descendants, parents first."""
    found = [root]
    for pid in found:
        found += sorted(children(pid))
    return found
