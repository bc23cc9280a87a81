"""A process that reaches the trigger of a fault injects it into itself, once in a run.

The injection is recorded before it happens, in two places: an event for the report, and a claim, so
that the step can be replayed without the fault. Faults of an agent are in
`agent/fault_injection.py`.
"""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic.events import FaultInjected
from elastic.faults.plan import RESTORE, SAVE_POINTS, STEP_POINTS, At, Fault, Kind, parse
from elastic.observe.log import EventLog
from elastic.system.clock import Clock
from elastic.system.files import make_folders


class InjectedFault(Exception):  # noqa: N818 - no error of the program or its user
    """What the action `raise` raises in a worker."""


class Claims:
    """Only the process that creates a fault's file in the run directory may inject the fault.

    Claims outlive the processes that the faults kill, so a replayed step does not meet its fault
    again. Nodes that share no run directory (it is a URL) have claims of their own: there each
    machine injects a fault that several machines reach.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, fault: Fault) -> bool:
        """Whether this process must inject it."""
        path = self._path(fault)
        try:
            make_folders(path.parent)
            path.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError as error:
            # The drill may be about a full disk. A fault injected without its claim would come back
            # at every replay of the step, and the run would never get past it.
            print(f"fault not injected, its claim cannot be written ({error}): {fault.text}", flush=True)
            return False
        return True

    def is_taken(self, fault: Fault) -> bool:
        return os.path.exists(self._path(fault))  # noqa: PTH110 - Path.exists may raise

    def _path(self, fault: Fault) -> Path:
        # Named after the line and not after its number: the user may edit the plan between two
        # starts of a run, and what was injected must stay injected.
        return self._folder / re.sub(r"[^a-z0-9.]+", "-", fault.text)


class FaultInjector:
    """Injects the faults of one process into that process."""

    def __init__(self, text: str, folder: Path, log: EventLog, clock: Clock) -> None:
        """text: the whole plan; a trigger that this process never reaches injects nothing."""
        self.faults = parse(text)
        self._claims = Claims(folder)
        self._log = log
        self._clock = clock
        self._slow_s = 0.0
        # Flips a bit of parameters, optimizer or gradient: only a worker has them.
        self.flip: Callable[[str], None] = lambda _target: None

    def reach(self, at: At) -> None:
        """Inject what the plan has for this place. May raise InjectedFault, or never return."""
        for fault in self.faults:
            if fault.trigger == at and self._claims.take(fault):
                is_of_step = at.point in STEP_POINTS + SAVE_POINTS
                self._log.record(FaultInjected(fault=fault.text, step=at.number if is_of_step else None))
                self._inject(fault)
        if at.point == STEP_POINTS[0] and self._slow_s:
            self._clock.sleep(self._slow_s)

    def _inject(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.RAISE:
                raise InjectedFault(f"injected: {fault.text}")
            case Kind.EXIT:
                os._exit(int(fault.amount))
            case Kind.HANG:
                # The main thread never comes back to the recipe, but signal handlers still run: the
                # agent's SIGQUIT, which asks for the stacks of all threads, is answered.
                while True:
                    signal.pause()
            case Kind.PAUSE:
                pause([os.getpid()], fault.amount)
            case Kind.FLIP:
                self.flip(fault.target)
            case Kind.SLOW:
                self._slow_s = fault.amount
            case Kind.TERMINATE:
                raise AssertionError("only an agent terminates, see agent/fault_injection.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFaults:
    """The triggers that one worker of one generation can reach."""

    injector: FaultInjector
    rank: int
    generation: int

    def at_step(self, step: int) -> Callable[[str], None]:
        """To be called with each point of this step."""
        return lambda point: self.injector.reach(At(point=point, number=step, who=self.rank))

    def at_restore(self) -> None:
        self.injector.reach(At(point=RESTORE, number=self.generation, who=self.rank))


def pause(pids: list[int], seconds: float) -> None:
    """Stop these processes, this one among them, and continue them `seconds` later.

    A stopped process cannot continue itself, so a shell does it.
    """
    # The shell that pauses a worker stays in the worker's session, and so ends with it. That of an
    # agent leads a session of its own: the processes that it stops, or the shell that sees them
    # stopped, must not take it down, because nothing else would ever continue the agent.
    subprocess.run(
        ["/bin/sh", "-c", 'kill -STOP "$@"; sleep "$0"; kill -CONT "$@"', str(seconds), *map(str, pids)],
        stdin=subprocess.DEVNULL,
        start_new_session=len(pids) > 1,
        check=False,
    )
