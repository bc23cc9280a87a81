"""Workers are forked from a fork server, or spawned where forking is not possible.

A fork takes milliseconds. Spawning is never an error, only slower by seconds, and the console shows
why it was necessary. Workers of a script without this library are always spawned: as under
torchrun, its first lines may set what torch reads when it is imported.

Installed code is that of the time when the fork server started, and the recipe that of the time
when a worker starts.
"""

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elastic.agent.worker_process import ForkServerClient, Process, ServerGone, never
from elastic.errors import CannotStart
from elastic.system.fork_protocol import StartRequest
from elastic.system.untrusted import parse_number


class Spawner:
    """Starts the processes that run the recipe on this node; `close` ends them."""

    def __init__(self, recipe: Path, report: Callable[[str], None], *, forks: bool = True) -> None:
        """report: prints a line on the console. forks: from a fork server that imports meanwhile.

        Raises CannotStart.
        """
        self.report = report
        self.interrupted = never  # whether workers are waited for no more
        self._recipe = recipe if forks else None  # None where all are spawned
        self._server = ForkServerClient.spawn(self._recipe)
        self._imports = forks  # the living server; False if it only spawns
        self._said = ""

    def close(self) -> None:
        self._server.close()

    def count_gpus(self) -> int:
        """How many torch finds: the fork server tells it as soon as it has imported torch."""
        if self._imports:
            with suppress(ServerGone):  # the first process that is to be started reports it
                self._server.wait_ready()
                return self._server.gpus or 0
        words = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"]
        found = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        return parse_number(found.stdout.strip()) or 0

    def renew(self, interrupted: Callable[[], bool] = never) -> None:
        """Call between generations, with no live workers.

        Starts another fork server if this one died or only spawns, and waits until it is ready, or
        until `interrupted()`, which is asked again and again: a node that is to leave needs no
        workers.
        """
        if self._server.exit_code is None and self._imports == (self._recipe is not None):
            return
        self.report("the fork server died; another one is started")
        try:
            self._replace(self._recipe)
            self._server.wait_ready(interrupted)
        except ServerGone as reason:
            self._give_up(str(reason))
        except CannotStart as reason:  # which may pass: the next generation tries again
            self.report(str(reason))

    def fork_no_more(self, reason: str) -> None:
        """Spawn all workers from now on: those of this recipe cannot inherit what was imported.

        Raises CannotStart.
        """
        self._recipe = None
        self._replace(None)
        self._say(reason)

    def start(self, request: StartRequest, *descriptors: int) -> Process:
        """descriptors: as in StartRequest. Raises CannotStart."""
        try:
            process = self._server.start(request, descriptors, self.interrupted)
        except ServerGone as reason:
            self._give_up(str(reason))
            self._replace(None)
            process = self._server.start(request, descriptors)
        if process.spawned:
            self._say(process.spawned)
        return process

    def _give_up(self, reason: str) -> None:
        """One that failed by itself while it imported would fail again. One that was killed, for
        instance for want of memory, may succeed at the next attempt.
        """
        if not self._server.is_ready and self._server.exit_code != -signal.SIGKILL:
            self._recipe = None
        self._say(reason)

    def _replace(self, recipe: Path | None) -> None:
        server = ForkServerClient.spawn(recipe)
        self._server.close()
        self._server, self._imports = server, recipe is not None

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            self.report(
                f"workers are spawned, which takes seconds, and not forked from the fork server: {reason}"
            )
