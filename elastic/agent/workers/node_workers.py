"""The worker processes of one generation on one node: started together, watched, and never left behind.

Each leads a session of its own, so that a terminal's Ctrl-C does not reach it, and dies with this agent. Its output goes straight into
its log file: nothing is lost when the agent dies, and no pipe can fill up.
"""

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.agent.workers.process import Process, ProcessStart, kill_session, wait_any_exit
from elastic.system.clock import SystemClock

KILL_WAIT_S = 30.0
_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    rank: int
    local_rank: int
    env: Mapping[str, str]
    log: Path


class Workers:
    """A node's workers of one generation; `codes` is what is known about their ends, in the order in which they were seen."""

    def __init__(
        self, plans: list[WorkerStart], words: tuple[str, ...], start: Callable[[ProcessStart], Process]
    ) -> None:
        """words: the recipe and its arguments."""
        self.codes: dict[int, int] = {}
        self.killed: set[int] = set()
        self._children: dict[int, Process] = {}
        for plan in plans:
            self._children[plan.rank] = _start(plan, words, start)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: child.pid for rank, child in self._children.items()}

    def poll(self) -> list[int]:
        """Ranks that ended since the last look."""
        ended = {rank: code for rank in self._alive() if (code := self._children[rank].poll()) is not None}
        self.codes.update(ended)
        return list(ended)

    def wait(self, timeout_s: float) -> None:
        """Return as soon as a worker may have ended; `poll` says which. With none alive, or nothing new, when the time is over."""
        alive = [self._children[rank] for rank in self._alive()]
        # The word of an end may have come in with another answer: the descriptor would stay silent about it.
        if all(child.poll() is None for child in alive):
            wait_any_exit(alive, timeout_s)

    def terminate(self) -> None:
        """Ask politely: SIGTERM to each main process, not to its children, which may be loading the data of the step to be finished."""
        for rank in self._alive():
            if self._children[rank].poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(self._children[rank].pid, signal.SIGTERM)

    def kill(self) -> list[int]:
        """SIGKILL to every session that is left, children included; returns the ranks that were alive."""
        alive = self._alive()
        self.killed.update(alive)
        for child in self._children.values():
            kill_session(child)
        self._wait_for_all()
        return alive

    def _wait_for_all(self) -> None:
        deadline = _CLOCK.monotonic() + KILL_WAIT_S
        self.poll()
        while self._alive():
            if _CLOCK.monotonic() >= deadline:
                for rank in self._alive():
                    self._children[rank].give_up()
            self.wait(max(0.0, deadline - _CLOCK.monotonic()))
            self.poll()

    def _alive(self) -> list[int]:
        return [rank for rank in self._children if rank not in self.codes]


def _start(plan: WorkerStart, words: tuple[str, ...], start: Callable[[ProcessStart], Process]) -> Process:
    plan.log.parent.mkdir(parents=True, exist_ok=True)
    # "x": a log belongs to one worker of one generation and is never overwritten.
    with plan.log.open("xb") as log:
        return start(ProcessStart(words=words, env=plan.env, out=log.fileno(), err=log.fileno()))
