"""Agents inject the faults of a plan that hit a node, and the repeated ones, each at most once.

A repeated fault needs no message between agents. Each of them draws the victim and the time of the
next injection from the seed and the number of injections so far, and so comes to the same result.
The agent that has the victim carries it out. So it does not matter which agent dies, that of rank 0
or one that was about to tell the others. Agents that disagree for a moment about the members of the
group may draw different victims; the first to take the claim injects, and the other one does not.
An agent that dies between its claim and the injection leaves the fault out.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from elastic.events import FaultInjected
from elastic.faults.inject import Claims, pause_for
from elastic.faults.pause import process_tree
from elastic.faults.plan import AtIntervals, AtNode, AtRendezvous, Fault, Pause, Terminate
from elastic.observe.log import EventLog
from elastic.rendezvous.generation import Generation
from elastic.system.clock import Clock


@dataclass(frozen=True, slots=True)
class Targets:
    """Pids on this node: its running workers by rank, its uploader and its fork server, if any."""

    workers: Mapping[int, int]
    uploader: int | None
    fork_server: int | None


class NodeFaults:
    """Of `faults`, those whose triggers only an agent sees."""

    def __init__(self, faults: tuple[Fault, ...], claims: Claims, log: EventLog, clock: Clock) -> None:
        self._faults = faults
        self._claims = claims
        self._log = log
        self._repeated = [
            RepeatedFault(fault, fault.trigger, claims, clock)
            for fault in faults
            if isinstance(fault.trigger, AtIntervals)
        ]

    def enter(self, generation: Generation) -> None:
        """A generation has formed with this node, whose workers are not started yet."""
        here = AtRendezvous(generation=generation.number, node=generation.rank_of_node)
        for fault in self._faults:
            if fault.trigger == here and self._claims.take(fault):
                self._inject(fault, None)

    def poll(self, generation: Generation, step: int, targets: Targets) -> None:
        """Inject what is due. step: the last that all workers of this node finished, 0 for none."""
        for fault in self._faults:
            due = fault.trigger
            is_due = isinstance(due, AtNode) and due.node == generation.rank_of_node and due.step <= step
            if is_due and self._claims.take(fault):
                self._inject(fault, step)
        for repeated in self._repeated:
            victim = repeated.poll(generation, targets)
            if victim is not None:
                self._log.record(FaultInjected(fault=repeated.fault.text, step=step))
                _kill(victim)

    def _inject(self, fault: Fault, step: int | None) -> None:
        self._log.record(FaultInjected(fault=fault.text, step=step))
        match fault.action:
            case Pause(seconds=seconds):
                pause_for(seconds, with_children=True)
            case Terminate():
                os.kill(os.getpid(), signal.SIGTERM)
            case _:
                _kill(os.getpid())


class RepeatedFault:
    """A repeated fault as one agent sees it: how often it was injected, and when last."""

    def __init__(self, fault: Fault, every: AtIntervals, claims: Claims, clock: Clock) -> None:
        self.fault = fault
        self._every = every
        self._claims = claims
        self._clock = clock
        self._injections = 0
        self._since_s = clock.monotonic()

    def poll(self, generation: Generation, targets: Targets) -> int | None:
        """The pid that this agent is to kill now, if any."""
        while self._claims.is_taken(self.fault, self._injections):
            self._injections += 1
            self._since_s = self._clock.monotonic()
        if self._clock.monotonic() - self._since_s < self._every.wait_s(self._injections):
            return None
        victim = self._victim(generation, targets)
        return victim if victim is not None and self._claims.take(self.fault, self._injections) else None

    def _victim(self, generation: Generation, targets: Targets) -> int | None:
        """None where the victim is on another node, or not running now."""
        if self._every.victim == "worker":
            return targets.workers.get(self._every.pick(self._injections, generation.world_size))
        if self._every.pick(self._injections, len(generation.members)) != generation.rank_of_node:
            return None
        return {"node": os.getpid(), "uploader": targets.uploader, "warm parent": targets.fork_server}[
            self._every.victim
        ]


def _kill(pid: int) -> None:
    """SIGKILL; to this process itself with all that it started, as if the node were lost."""
    children = process_tree(pid)[1:] if pid == os.getpid() else []
    for each in [*children, pid]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
