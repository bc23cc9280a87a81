"""The commands of a check run in the background, and nothing of them outlasts it.

Each is a process of its own, whose run directory and temporary files are in the check's folder. At
the end, however it comes, every process that a command left behind is killed: they become children
of this process when their parents die.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from elastic.check.plan import Launch
from elastic.config import environment
from elastic.config.environment import CheckRequest
from elastic.config.options import CheckOptions
from elastic.config.run_dir import RunDir
from elastic.events import Stopped, WorkerFailed
from elastic.observe import logged_event
from elastic.observe.log import parse_lines, read_events
from elastic.observe.logged_event import Events
from elastic.proof.evidence import TraceLine
from elastic.system import processes
from elastic.system.clock import SystemClock
from elastic.system.untrusted import decode

AT_ONCE = 2  # more would only wait for each other's processors
LIMIT_S = 900.0
_LAST_LINES = 25
_LAST_BYTES = 2**16  # of what a command printed
_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """code: None where the command did not end within LIMIT_S. words: why it failed, if it did.

    stopped: why the recipe ended the run early, None where it did not.
    """

    code: int | None
    words: str
    lines: list[TraceLine]
    seconds: float
    stopped: str | None


class Runs:
    """As a context: the commands that were begun in it are gone when it is left."""

    def __init__(self, options: CheckOptions, root: Path) -> None:
        self._options = options
        self._root = root
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._lock = Lock()
        self._running: set[subprocess.Popen[bytes]] | None = set()  # None once nothing may begin
        self._earlier_children: set[int] = set()

    def __enter__(self) -> Self:
        self._earlier_children = processes.children()
        processes.adopt_orphans()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            running, self._running = self._running or set(), None
        for process in running:
            process.kill()
        self._pool.shutdown(cancel_futures=True)
        processes.kill_children(keeps=self._earlier_children.__contains__)

    def begin(
        self, chain: Sequence[Launch], steps: int, seconds: float = 0.0
    ) -> "Future[list[Ended | None]]":
        """Run these commands one after the other, in one run directory.

        The answer has None for each command after a failed one: it would
        resume something else. steps, seconds: how far each of them trains (CheckRequest).
        """
        return self._pool.submit(self._run_chain, chain, steps, seconds)

    def _run_chain(self, chain: Sequence[Launch], steps: int, seconds: float) -> list[Ended | None]:
        found: list[Ended | None] = []
        with tempfile.TemporaryDirectory(dir=self._root, ignore_cleanup_errors=True) as folder:
            for launch in chain:
                pairs = zip(found, chain, strict=False)
                goes_on = all(each is not None and each.code == of.code for each, of in pairs)
                found.append(self._run(Path(folder), launch, steps, seconds) if goes_on else None)
        return found

    def _run(self, folder: Path, launch: Launch, steps: int, seconds: float) -> Ended | None:
        began_s, run = _CLOCK.monotonic(), RunDir.parse(str(folder / "run"))
        trace, printed = folder / "trace", folder / "output"
        trace.unlink(missing_ok=True)
        request = CheckRequest(
            pid=os.getpid(),
            trace=str(trace),
            least_steps=steps,
            seconds=seconds,
            leave_at=launch.leave_at,
        )
        options = self._options
        # -P: files in the working directory are not imported, as they are not by `elastic-train`.
        command = [sys.executable, "-P", "-m", "elastic.cli", options.recipe, "--run-dir", run.url]
        command += ["--nproc-per-node", str(launch.workers), *launch.options, "--", *options.recipe_args]
        env = environment.variables() | request.to_env() | {"TMPDIR": str(self._root)}
        with printed.open("w+b") as output:
            with self._lock:
                if self._running is None:
                    return None
                process = subprocess.Popen(
                    command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
                self._running.add(process)
            code: int | None = None
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(LIMIT_S)
            with self._lock:
                if self._running is not None:
                    self._running.remove(process)
            if code is None:
                process.kill()
                process.wait()
            output.seek(max(0, output.seek(0, os.SEEK_END) - _LAST_BYTES))
            text = output.read().decode(errors="replace")
        data = trace.read_bytes() if trace.exists() else b""
        events = read_events(run.events)
        stopped = logged_event.last(events, Stopped)
        return Ended(
            code=code,
            words=_why(events, text),
            lines=list(parse_lines(data.splitlines(), _parsed)),
            seconds=_CLOCK.monotonic() - began_s,
            stopped=None if stopped is None else stopped.event.reason,
        )


def _parsed(record: object) -> TraceLine:
    return decode(TraceLine, record, what="a line of a trace")


def _why(events: Events, output: str) -> str:
    """The error of the worker that failed last; or the last words of a command that had none."""
    failed = logged_event.last(events, WorkerFailed)
    if failed is not None and failed.event.traceback.startswith("Traceback"):
        return failed.event.traceback.rstrip()
    if failed is not None:
        return f"{failed.event.message}\n{failed.event.traceback}".rstrip()
    lines = output.strip().splitlines()
    refused = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if refused:  # by the recipe, before any worker began; the command's own words follow
        lines = [line for line in lines[refused[-1] :] if not line.startswith("elastic-train: ")]
    return "\n".join(lines[-_LAST_LINES:]).removeprefix("error: ").removeprefix("elastic-train: ")
