"""A notice that this machine will be taken away leads, within moments, to the drain of a SIGTERM.

One thread looks for a file, and runs a command that asks, for example, a service of the user's. A
second one asks the metadata service of a cloud. None can delay training. A notice is not judged: a
file that exists, even empty, is one, and so is a command that exits with 0. A command that cannot
be run, or takes too long, is no notice; that is reported once, and the command is run again.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from elastic.agent.clouds.services import Cloud
from elastic.agent.clouds.watch import watch_cloud
from elastic.system.clock import Clock

POLL_S = 0.04
NOTICE_EVERY_S = 5.0
COMMAND_S = 10.0
END_S = 5.0
Notices = Generator[bool | None, None, None]
_NOT_RUN = (126, 127)  # what a shell exits with when it cannot run a command, or does not find it


@contextmanager
def open_notices(
    file: str | None,
    command: str | None,
    cloud: Cloud | None,
    leave: Callable[[str], None],
    clock: Clock,
    report: Callable[[str], None],
) -> Iterator[None]:
    """While the context is open, the first notice calls `leave` with its reason, from a thread.

    file: a path that appears. command: for a shell. Where all are None, nothing is started.
    """
    is_over = threading.Event()
    if cloud is not None:
        asked = (cloud, leave, report, is_over.wait)
        # Nothing waits for its end: the service may not answer for a while. It has nothing but
        # a connection, and ends with the request, or with the process.
        threading.Thread(target=_watch_cloud, args=asked, name="notices of a cloud", daemon=True).start()
    sources: dict[str, Callable[[], Notices]] = {}
    if file is not None:
        sources[file] = partial(_file_notices, file)
    if command is not None:
        sources[command] = partial(command_notices, command, clock, report)
    watched = (sources, leave, report, is_over)
    thread = threading.Thread(target=_watch, args=watched, name="notices", daemon=True)
    if sources:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if sources:
            # A file system that does not answer may hold the thread; it ends with the process then.
            thread.join(END_S)


def command_notices(command: str, clock: Clock, report: Callable[[str], None]) -> Notices:
    """Run a shell command every NOTICE_EVERY_S, one at a time, without waiting for it.

    Yields whether it has just exited with 0; None while it runs. `close` kills the running command,
    with everything that it started.
    """
    is_reported = False
    while True:
        started_s = clock.monotonic()
        outcome = yield from _run(command, clock)
        if isinstance(outcome, str) and not is_reported:
            is_reported = True
            report(f"the command for notices, {command!r}, gives no answer ({outcome}); it is tried again")
        yield outcome == 0
        while clock.monotonic() - started_s < NOTICE_EVERY_S:
            yield False


def _run(command: str, clock: Clock) -> Generator[None, None, int | str]:
    """Returns the exit code of the command, or why it gave no answer."""
    deadline = clock.monotonic() + COMMAND_S
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        return str(error)
    try:
        while (code := process.poll()) is None:
            if clock.monotonic() > deadline:
                return f"it takes longer than {COMMAND_S:g} s"
            yield
        return f"it exits with {code}" if code in _NOT_RUN else code
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _file_notices(file: str) -> Notices:
    while True:
        yield os.path.exists(file)  # noqa: PTH110 - Path.exists raises where the folder may not be read


def _watch_cloud(
    cloud: Cloud, leave: Callable[[str], None], report: Callable[[str], None], wait: Callable[[float], bool]
) -> None:
    try:
        watch_cloud(cloud, leave, report, wait)
    # The edge of a thread: without this line the node would train on, deaf to notices.
    except Exception as error:
        report(f"no notice of {cloud.name} reaches this node any more ({error!r}); training goes on")


def _watch(
    sources: Mapping[str, Callable[[], Notices]],
    leave: Callable[[str], None],
    report: Callable[[str], None],
    is_over: threading.Event,
) -> None:
    """sources: what begins to look, by the words of the option."""
    looks = {source: begin() for source, begin in sources.items()}
    reported = set[str]()
    try:
        while not is_over.wait(POLL_S):
            for source, begin in sources.items():
                try:
                    if next(looks[source]):
                        leave(f"a notice ({source}) asks this node to leave")
                        return
                # The edge of a thread: the node would train on, deaf to the other source as well.
                except Exception as error:
                    looks[source] = begin()  # a generator that has raised is over
                    if source not in reported:
                        reported.add(source)
                        report(f"the look for a notice ({source}) failed ({error!r}); it is tried again")
                    if is_over.wait(NOTICE_EVERY_S):
                        return
    finally:
        for look in looks.values():
            look.close()
