"""One command of a check after the other, and nothing of them outlasts the check.

Each is a process of its own, whose run directory and temporary files are in the check's folder. At
the end, however it comes, every process that a command left behind is killed: they become children
of this process when their parents die.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elastic.check.plan import Launch
from elastic.config import environment
from elastic.config.options import CheckOptions
from elastic.config.run_dir import RunDir
from elastic.events import Stopped, WorkerFailed
from elastic.observe import log, logged_event
from elastic.proof.evidence import TraceLine
from elastic.system import processes
from elastic.system.clock import SystemClock
from elastic.system.untrusted import decode

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


@contextmanager
def none_outlives() -> Iterator[None]:
    """The commands that run inside it are gone when it is left."""
    earlier = processes.children()
    processes.adopt_orphans()
    try:
        yield
    finally:
        processes.kill_children(keeps=earlier.__contains__)


def run(options: CheckOptions, root: Path, launch: Launch, steps: int, seconds: float = 0.0) -> Ended:
    """Run one command in a new run directory, or in that of the command before, which it resumes.

    steps, seconds: how far it trains (CheckRequest).
    """
    began_s, run_dir = _CLOCK.monotonic(), RunDir.parse(str(root / "run"))
    trace, printed = root / "trace", root / "output"
    trace.unlink(missing_ok=True)
    if not launch.resumes:
        shutil.rmtree(run_dir.local, ignore_errors=True)
    request = environment.CheckRequest(
        pid=os.getpid(), trace=str(trace), least_steps=steps, seconds=seconds, leave_at=launch.leave_at
    )
    # -P: files in the working directory are not imported, as they are not by `elastic-train`.
    command = [sys.executable, "-P", "-m", "elastic.cli", options.recipe, "--run-dir", run_dir.url]
    command += ["--nproc-per-node", str(launch.workers), "--grace", f"{LIMIT_S:g}", "--standby", "off"]
    command += [*launch.options, "--", *options.recipe_args]
    env = environment.variables() | request.to_env() | {"TMPDIR": str(root)}
    code: int | None = None
    with printed.open("wb") as output, suppress(subprocess.TimeoutExpired):
        code = subprocess.run(
            command,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=LIMIT_S,
            check=False,
        ).returncode
    text = printed.read_bytes()[-_LAST_BYTES:].decode(errors="replace")
    data = trace.read_bytes() if trace.exists() else b""
    events = log.read_events(run_dir.events)
    stopped = logged_event.last(events, Stopped)
    return Ended(
        code=code,
        # A launch that did not end was not ended by a worker that the check had killed.
        words=_why([] if code is None else events, text),
        lines=list(log.parse_lines(data.splitlines(), partial(decode, TraceLine, what="a line of a trace"))),
        seconds=_CLOCK.monotonic() - began_s,
        stopped=None if stopped is None else stopped.event.reason,
    )


def _why(events: logged_event.Events, output: str) -> str:
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
