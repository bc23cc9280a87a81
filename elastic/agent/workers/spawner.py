"""Workers are forked in milliseconds from a warm parent whose code is what a new process would import now; where that cannot be, they start cold.

Cold is never an error, only slower, and is said with its reason.
"""

import os
import site
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import elastic
from elastic.agent.workers.fork_server_client import SIGKILLED, CannotFork, ForkedProcess, ForkServerClient
from elastic.agent.workers.process import Process, ProcessStart, spawn


class Spawner:
    """Starts whatever runs the recipe on this node; leave it, as a context, when nothing that it started is wanted any more."""

    def __init__(
        self,
        recipe: Path,
        say: Callable[[str], None],
        first: Callable[[Path], ForkServerClient] = ForkServerClient.start,
    ) -> None:
        """first: how the first warm parent comes about."""
        self.say = say
        self._recipe = recipe
        self._said = ""
        self._parent: ForkServerClient | None = None
        self._code: frozenset[tuple[str, int]] = frozenset()
        self._is_hopeless = sys.platform != "linux"
        self._begin(first)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._parent is not None:
            self._parent.close()
            self._parent = None

    @property
    def fork_server_pid(self) -> int | None:
        """Of the warm parent; None where there is none."""
        return self._parent.pid if self._parent is not None and self._parent.is_alive else None

    def renew(self) -> None:
        """Before the others are met, when no worker lives: begin anew where the warm parent died, or holds code that has changed on the disk, and wait until it is ready."""
        if self._parent is None:
            return
        has_changed = self._code != installed_code()
        if has_changed:
            self.say("installed code has changed; the warm parent imports it anew")
        elif self._parent.is_alive or self._is_hopeless:
            return
        else:
            self.say("the warm parent died; another one is started")
        self._parent.close()
        self._is_hopeless = False
        self._begin()
        try:
            self._parent.wait_ready()
        except CannotFork as reason:
            self._go_cold(str(reason))

    def start(self, start: ProcessStart) -> Process:
        if self._parent is not None and not self._is_hopeless:
            try:
                pid = self._parent.fork(start)
            except CannotFork as reason:
                self._go_cold(str(reason))
            else:
                return ForkedProcess(self._parent, pid)
        return spawn(start)

    def _begin(self, how: Callable[[Path], ForkServerClient] = ForkServerClient.start) -> None:
        if not self._is_hopeless:
            self._code = installed_code()
            self._parent = how(self._recipe)

    def _go_cold(self, reason: str) -> None:
        if self._parent is not None and not self._parent.is_ready:
            # One that ended by itself before it was ready would end again; after one that was killed, for want of memory say, another is tried.
            self._is_hopeless = self._parent.ended_by != SIGKILLED
        if reason != self._said:
            self._said = reason
            self.say(f"workers are not forked from the warm parent but started one by one: {reason}")


def installed_code() -> frozenset[tuple[str, int]]:
    """What a warm parent holds frozen: the names of what is installed and this library's own files, with times of change.

    A package that is replaced by another version leaves a new dist-info folder behind; other folders' times change when byte code is cached.
    """
    found = set()
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        if not Path(folder).is_dir():
            continue
        for entry in os.scandir(folder):
            is_record = entry.name.endswith((".dist-info", ".egg-info", ".egg-link", ".pth"))
            if entry.name != "__pycache__":
                found.add((entry.path, entry.stat().st_mtime_ns if is_record else 0))
    for package in elastic.__path__:
        found |= {(str(path), path.stat().st_mtime_ns) for path in Path(package).rglob("*.py")}
    return frozenset(found)
