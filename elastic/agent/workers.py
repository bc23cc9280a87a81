"""The worker processes of one generation on one node: started together, watched, and never left behind.

Each runs in its own session, so that a terminal's Ctrl-C does not reach it, and asks the kernel to die with this agent. Its output goes straight into
its log file: nothing is lost when the agent dies, and no pipe can fill up.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KILL_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    rank: int
    local_rank: int
    env: Mapping[str, str]
    log: Path


class Workers:
    """A node's workers of one generation; `codes` is what is known about their ends, in the order in which they were seen."""

    def __init__(self, plans: list[WorkerPlan], recipe: str, arguments: tuple[str, ...]) -> None:
        self.codes: dict[int, int] = {}
        self.killed: set[int] = set()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for plan in plans:
            self._processes[plan.rank] = _start(plan, recipe, arguments)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def poll(self) -> list[int]:
        """Ranks that ended since the last look."""
        new = []
        for rank, process in self._processes.items():
            if rank not in self.codes and process.poll() is not None:
                self.codes[rank] = process.returncode
                new.append(rank)
        return new

    def terminate(self) -> None:
        """Ask politely: SIGTERM to each main process, not to its children, which may be loading the data of the step to be finished."""
        for rank, process in self._processes.items():
            if rank not in self.codes:
                process.send_signal(signal.SIGTERM)

    def kill(self) -> list[int]:
        """SIGKILL to every session that is left, children included; returns the ranks that were alive."""
        alive = [rank for rank in self._processes if rank not in self.codes]
        self.killed.update(alive)
        for process in self._processes.values():
            # The session outlives its leader when data-loading processes are left, so dead workers' sessions are killed as well.
            _kill_session(process.pid)
        for rank in alive:
            self.codes[rank] = self._processes[rank].wait(KILL_WAIT_S)
        return alive


def _start(plan: WorkerPlan, recipe: str, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
    plan.log.parent.mkdir(parents=True, exist_ok=True)
    # "x": a log belongs to one worker of one generation and is never overwritten.
    with plan.log.open("xb") as log:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "elastic.train.worker", recipe, *arguments],
            env=dict(plan.env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _kill_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
