"""Carries out the faults of a plan in the process that reaches their point; each strikes once in a run.

That it struck is written down before it strikes: a file in the run directory, created exclusively, so that the step may be trained
again without it. It does nothing to other processes, machines or networks.
"""

import os
import signal
from pathlib import Path

from elastic.events import FaultInjected
from elastic.faults.plan import Deed, Fault
from elastic.observe.log import EventLog


class InjectedFault(Exception):  # noqa: N818 - it is not an error of anybody
    pass


class Faults:
    """The faults that this process may have to carry out."""

    def __init__(self, faults: tuple[Fault, ...], folder: Path, log: EventLog) -> None:
        self._faults = faults
        self._folder = folder
        self._log = log

    def reach(self, point: str, step: int) -> None:
        for fault in self._faults:
            if (fault.point, fault.step) == (point, step) and self._claim(fault):
                self._log.record(FaultInjected(fault=fault.text, step=step))
                self._strike(fault)

    def _claim(self, fault: Fault) -> bool:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            (self._folder / str(fault.index)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _strike(self, fault: Fault) -> None:
        match fault.deed:
            case Deed.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Deed.RAISE:
                raise InjectedFault(f"injected: {fault.text}")
            case Deed.EXIT:
                os._exit(fault.code)
