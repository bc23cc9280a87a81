"""Carries out the faults of a plan in the process that reaches their place; each strikes once in a run.

That it struck is written down before it strikes, so that the step may be trained again without it. It does nothing to other processes, machines or networks.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from elastic.events import FaultInjected
from elastic.faults import pause
from elastic.faults.claims import Claims
from elastic.faults.drag import Drag
from elastic.faults.grammar import parse
from elastic.faults.plan import (
    AtRestore,
    AtSave,
    AtStep,
    Exit,
    Fault,
    Hang,
    Kill,
    Pause,
    Raise,
    Slow,
    Terminate,
    Where,
)
from elastic.observe.log import EventLog
from elastic.system.clock import Clock


class InjectedFault(Exception):  # noqa: N818 - it is not an error of anybody
    pass


class Faults:
    """The faults that this process may have to carry out."""

    def __init__(self, faults: tuple[Fault, ...], folder: Path, log: EventLog, clock: Clock) -> None:
        self._faults = faults
        self._claims = Claims(folder)
        self._log = log
        self._drag = Drag(clock) if any(isinstance(fault.deed, Slow) for fault in faults) else None

    def expects(self, where: Where) -> bool:
        """Whether something may strike there."""
        return any(fault.where == where for fault in self._faults)

    def reach(self, where: Where) -> None:
        step = where.step if isinstance(where, AtStep | AtSave) else None
        if self._drag is not None and isinstance(where, AtStep) and where.point == "forward":
            self._drag.begin(where.step)
        for fault in self._faults:
            if fault.where == where and self._claims.take(fault):
                self._log.record(FaultInjected(fault=fault.text, step=step))
                self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        match fault.deed:
            case Kill():
                os.kill(os.getpid(), signal.SIGKILL)
            case Raise():
                raise InjectedFault(f"injected: {fault.text}")
            case Exit(code=code):
                os._exit(code)
            case Hang():
                while True:
                    signal.pause()  # signals are answered, also the one that asks for stacks
            case Pause(seconds=seconds):
                stop_for(seconds, with_children=False)
            case Slow():
                assert self._drag is not None
                self._drag.slow(fault.deed)
            case Terminate():
                raise AssertionError("an agent's, see agent/fault_injection.py")


class WorkerFaults:
    """The places of one worker of one generation."""

    def __init__(self, faults: Faults, *, rank: int, generation: int) -> None:
        self._faults = faults
        self._rank = rank
        self._generation = generation

    @staticmethod
    def of(
        plan: str | None, folder: Path, log: EventLog, clock: Clock, *, rank: int, generation: int
    ) -> "WorkerFaults | None":
        """None where nothing in the plan can strike this worker."""
        mine = tuple(
            fault
            for fault in parse(plan or "")
            if isinstance(fault.where, AtStep | AtRestore) and fault.where.rank == rank
        )
        return (
            WorkerFaults(Faults(mine, folder, log, clock), rank=rank, generation=generation) if mine else None
        )

    def at_step(self, step: int) -> Callable[[str], None]:
        """To be called with each point of this step."""
        return lambda point: self._faults.reach(AtStep(step=step, rank=self._rank, point=point))

    def in_snapshot(self, step: int) -> Callable[[], None] | None:
        """To be called in the middle of the copy; None where nothing strikes there."""
        where = AtStep(step=step, rank=self._rank, point="snapshot")
        return (lambda: self._faults.reach(where)) if self._faults.expects(where) else None

    def at_restore(self) -> None:
        self._faults.reach(AtRestore(generation=self._generation, rank=self._rank))


def stop_for(seconds: float, *, with_children: bool) -> None:
    """Stop this process, or all that comes from it as well, and go on so many seconds later."""
    whom = "tree" if with_children else "self"
    # A worker's helper stays in its session, and so ends with it. An agent's leads its own: none of those that it stops may take it along.
    subprocess.run(
        [sys.executable, "-I", "-S", pause.__file__, str(os.getpid()), str(seconds), whom],
        stdin=subprocess.DEVNULL,
        start_new_session=with_children,
        check=False,
    )
