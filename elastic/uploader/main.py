"""Every offer has one end, even if its client is dead: committed, failed, fenced, differs, dropped.

    python -m elastic.uploader.main '{"checkpoints_url": ...}'

One save is in flight. Of the others the newest waits, and up to four final ones. A save that is
dropped for a newer one leaves no event, nor does one whose step another writer had committed. The
owner holds the uploader's standard input: its end means finish and exit. The uploader does not
promise to outlive its owner for longer than its saves may take. It imports no torch, so that it
starts at once.
"""

import json
import os
import selectors
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_USAGE, StoreFailed, UsageError
from elastic.faults.inject import FaultInjector
from elastic.faults.plan import At
from elastic.observe.log import EventLog
from elastic.observe.log_shipper import MetricsShipper
from elastic.storage.objects import Objects
from elastic.storage.remote import open_store
from elastic.system import stop_signals
from elastic.system.clock import Clock, SystemClock, share_boot_wall_s
from elastic.system.json_lines import JsonLineSocket
from elastic.uploader.jobs import OVERTIME_S, Job, Jobs, answer
from elastic.uploader.protocol import Entered, Offer, UploaderConfig, parse_request
from elastic.uploader.save import Saver, report_problem

METRICS_LIMIT_S = 10.0  # of a request: the checkpoint waits for it, and the grace may be short
_MOST_SOURCES = 67  # 64 clients, and three of our own
_MOST_FDS = 8  # that one client may send ahead of its offers


class Uploader:
    """The process's loop over its socket, its owner's pipe and the results of its saves."""

    def __init__(self, jobs: Jobs, listener: socket.socket, owner_fd: int, clock: Clock) -> None:
        self._jobs = jobs
        self._clock = clock
        self._listener = listener
        self._owner_fd = owner_fd
        self._exit_by = inf  # until the owner is gone
        # poll, unlike epoll, takes any descriptor as standard input.
        self._selector = selectors.PollSelector()
        self._selector.register(jobs.wakeup, selectors.EVENT_READ, jobs.advance)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(owner_fd, selectors.EVENT_READ, self._receive_from_owner)

    def run(self) -> bool:
        """Serve until the owner is gone and everything is done; False when saves had to be
        abandoned.
        """
        while True:
            ready = self._selector.select(self._timeout_s())
            for key, _ in ready:
                key.data()
            self._jobs.check_overdue()
            # Only when nothing was readable is it certain that no offer from before the owner's end
            # is unread.
            if not ready and self._is_finished():
                return True
            if self._clock.monotonic() >= self._exit_by:
                self._jobs.abandon()
                return False

    def _is_finished(self) -> bool:
        return self._jobs.is_idle and self._exit_by < inf

    def _timeout_s(self) -> float | None:
        if self._is_finished():
            return 0.0
        until = min(self._jobs.overdue_s, self._exit_by)
        return None if until == inf else max(0.0, until - self._clock.monotonic())

    def _receive_from_owner(self) -> None:
        if not os.read(self._owner_fd, 4096):
            self._selector.unregister(self._owner_fd)
            self._exit_by = self._clock.monotonic() + self._jobs.finish_limit_s + OVERTIME_S

    def _accept(self) -> None:
        client = JsonLineSocket(self._listener.accept()[0], most_fds=_MOST_FDS)
        if len(self._selector.get_map()) >= _MOST_SOURCES:
            client.close()
            return
        self._selector.register(client, selectors.EVENT_READ, lambda: self._receive(client))

    def _receive(self, client: JsonLineSocket) -> None:
        try:
            for message in client.receive():
                self._take(client, message)
            is_over = client.has_ended
        except ConnectionError:  # a worker that ended, or was killed, before it read its answer
            is_over = True
        except (ValueError, OSError) as error:
            report_problem(f"a client of the uploader is cut off: {error}")
            answer(client, {"error": str(error)})
            is_over = True
        if is_over:
            self._selector.unregister(client)
            client.close()

    def _take(self, client: JsonLineSocket, message: dict[str, Any]) -> None:
        match parse_request(message):
            case Entered() as request:
                # This loop takes messages one by one, so that the node has entered before a later
                # offer is judged.
                self._jobs.saver.enter(request.entered)
                answer(client, message)
            case Offer() as offer:
                self._jobs.add(Job.accept(offer, client.take_fd(), client))


def serve(
    config: UploaderConfig, owner_fd: int, *, reached: Callable[[str, int], None], ready: Callable[[], None]
) -> bool:
    """Run an uploader until the end of `owner_fd`; `ready` is called once clients can connect.

    `reached` is called with a point of the commit protocol (upload, before-commit, after-commit)
    and the step. Raises UsageError before `ready` for a socket or a store that cannot be used.
    """
    clock = SystemClock()
    log = EventLog(Path(config.events_path), node=config.node, clock=clock)
    saver = Saver(open_store(config.checkpoints_url), config, clock, reached)
    jobs = Jobs(saver, config, log, clock)
    with _listen(config.socket_path) as listener:
        ready()
        try:
            return Uploader(jobs, listener, owner_fd, clock).run()
        finally:
            Path(config.socket_path).unlink(missing_ok=True)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # A killed predecessor left its socket there; the owner never runs two uploaders on one path.
    Path(path).unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"expected a path of at most 100 bytes for the uploader's socket, found {path} ({error}); set TMPDIR to a folder with a shorter name"
        ) from error
    finally:
        os.umask(before)
    listener.listen(_MOST_SOURCES)
    return listener


def _notify_owner(message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # it was told to leave before it was ready
        os.write(1, f"{json.dumps(message)}\n".encode())
    # The owner reads this pipe no further: what a library prints later goes to the log.
    os.dup2(2, 1)


def _reached(config: UploaderConfig) -> Callable[[str, int], None]:
    """What happens at the points of the commit protocol: the faults of the run's plan that are
    injected into this process, and before the commit the upload of the metrics.

    The lines of metrics are uploaded before the checkpoint that holds their steps. A node that
    resumes from the checkpoint elsewhere then finds them in the run directory.
    """
    clock = SystemClock()
    log = EventLog(Path(config.events_path), node=config.node, clock=clock)
    faults = FaultInjector(config.faults or "", Path(config.faults_path), log, clock)
    metrics = None
    if config.metrics is not None:
        limits = {"limit_s": METRICS_LIMIT_S, "first_limit_s": METRICS_LIMIT_S}
        objects = Objects(config.metrics.url, **limits)
        metrics = MetricsShipper(Path(config.metrics.metrics), config.node, objects)

    def reached(point: str, step: int) -> None:
        if metrics is not None and point == "before-commit":
            try:
                metrics.upload(others_upload=True)
            except StoreFailed as error:
                report_problem(f"the metrics up to step {step} are not in the run directory yet: {error}")
        faults.reach(At(point=point, number=step))

    return reached


def main(arguments: list[str]) -> int:
    # A terminal's Ctrl-C, or a kill of the whole group, reaches this process too; it leaves when
    # its owner does.
    stop_signals.ignore()
    try:
        config = UploaderConfig.parse(arguments[0])
        share_boot_wall_s(config.boot_wall_s)
        is_done = serve(config, 0, reached=_reached(config), ready=lambda: _notify_owner({"ready": True}))
    except UsageError as error:
        _notify_owner({"error": str(error)})
        return EXIT_USAGE
    return EXIT_COMPLETE if is_done else EXIT_FAILED


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stderr.flush()
    # A storage library's threads that hang in a call would hold up an ordinary exit.
    os._exit(exit_code)
