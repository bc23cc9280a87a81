"""Workers are forked from a fork server that holds the code of today, and else spawned.

Those of a script without this library are always spawned: as under torchrun, its first lines may
set what torch reads when it is imported.

A fork takes milliseconds. Spawning is never an error, only slower by seconds, and the console shows
why it was necessary.
"""

import signal
import site
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import elastic
from elastic.agent.fork_server_client import CannotFork, ForkServerClient
from elastic.agent.worker_process import Process, ProcessStart, SpawnedProcess
from elastic.errors import CannotStart
from elastic.system.untrusted import parse_number

_Code = frozenset[tuple[str, int]]


class Spawner:
    """Starts the processes that run the recipe on this node; `close` ends the forked ones."""

    def __init__(self, recipe: Path, report: Callable[[str], None], *, forks: bool = True) -> None:
        """report: prints a line on the console. forks: from a fork server, which is started now and
        imports meanwhile. Raises CannotStart.
        """
        self.report = report
        self.interrupted: Callable[[], bool] = lambda: False  # whether workers are waited for no more
        self._recipe = recipe
        self._reported = ""
        self._is_hopeless = False  # another fork server would fail as well
        self._code = _installed_code_or(frozenset())  # which the fork server holds
        try:
            self._server = ForkServerClient.spawn(recipe) if forks else None
        except OSError as error:
            raise CannotStart(f"no process can be started to fork the workers from ({error})") from error

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    @property
    def fork_server_pid(self) -> int | None:
        """None while no fork server is alive."""
        return self._server.pid if self._server is not None and self._server.exit_code is None else None

    def count_gpus(self) -> int:
        """How many torch finds: the fork server tells it as soon as it has imported torch."""
        if self._server is not None:
            with suppress(CannotFork):  # the first worker that is to be forked reports it
                self._server.wait_ready()
                return self._server.gpus or 0
        words = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"]
        found = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        return parse_number(found.stdout.strip()) or 0

    def renew(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Call between generations, with no live workers.

        Restarts the fork server if it died or if installed code changed on disk, and waits until it
        is ready, or until `interrupted()`, which is asked again and again: a node that is to leave
        needs no workers.
        """
        if self._server is None:
            return
        code = _installed_code_or(self._code)
        if self._code != code:
            self.report("installed code has changed; the fork server imports it again")
        elif self._server.exit_code is None or self._is_hopeless:
            return
        else:
            self.report("the fork server died; another one is started")
        self._server.close()
        self._is_hopeless = False
        self._code = code
        try:
            self._server = ForkServerClient.spawn(self._recipe)
        except OSError as error:
            # No memory or no process left, which may pass: the next generation tries again.
            self.report(f"no process can be started to fork the workers from ({error})")
            return
        try:
            self._server.wait_ready(interrupted)
        except CannotFork as reason:
            self._report_spawning(str(reason))

    def fork_no_more(self, reason: str) -> None:
        """Spawn all workers from now on: those of this recipe cannot inherit what was imported."""
        self.close()
        self._server = None
        self._report_spawning(reason)

    def start(self, start: ProcessStart) -> Process:
        """Raises CannotStart."""
        if self._server is not None and not self._is_hopeless:
            try:
                return self._server.fork(start, self.interrupted)
            except CannotFork as reason:
                self._report_spawning(str(reason))
        return SpawnedProcess(start)

    def _report_spawning(self, reason: str) -> None:
        if self._server is not None and not self._server.is_ready:
            # One that failed by itself while it imported would fail again. One that was killed, for
            # instance for want of memory, may succeed at the next attempt.
            self._is_hopeless = self._server.exit_code != -signal.SIGKILL
        if reason != self._reported:
            self._reported = reason
            self.report(
                f"workers are spawned, which takes seconds, and not forked from the fork server: {reason}"
            )


def _installed_code_or(known: _Code) -> _Code:
    """What is `known` where a folder cannot be listed now, perhaps while a package is replaced."""
    with suppress(OSError):
        return installed_code()
    return known


def installed_code() -> _Code:
    """Names of installed packages, and this library's files with modification times in ns.

    Equal values mean that a new interpreter would import what the fork server holds in memory.

    Of installed packages only records of installation count with their times: a package that is
    replaced by another version leaves a new dist-info folder behind, while the time of the
    package's own folder also changes whenever Python caches byte code in it. Raises OSError.
    """
    found = set()
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        for path in Path(folder).glob("*"):  # none where there is no such folder
            is_record = path.suffix in (".dist-info", ".egg-info", ".egg-link", ".pth")
            if path.name != "__pycache__":
                found.add((str(path), _changed_ns(path) if is_record else 0))
    for package in elastic.__path__:
        found |= {(str(path), _changed_ns(path)) for path in Path(package).rglob("*.py")}
    return frozenset(found)


def _changed_ns(path: Path) -> int:
    with suppress(FileNotFoundError):  # an installation is under way
        return path.stat().st_mtime_ns
    return 0
