"""Every offer is saved or reported as failed, also when its client is dead.

    python -m elastic.uploader.main '{"checkpoints_url": ...}'

One save is in flight, and the newest other one waits. The owner holds the uploader's standard
input: its end means finish and exit. The uploader does not promise to outlive its owner for longer
than its saves may take. It imports no torch, so that it starts at once.
"""

import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_USAGE, StoreFailed, UsageError
from elastic.faults.grammar import parse
from elastic.faults.inject import FaultInjector
from elastic.faults.plan import AtSave
from elastic.observe.log import EventLog
from elastic.observe.upload import PART_LIMIT_S, MetricsUpload
from elastic.storage.objects import Objects
from elastic.storage.remote import open_store
from elastic.system.clock import Clock, SystemClock
from elastic.system.json_lines import JsonLineSocket
from elastic.uploader.jobs import OVERTIME_S, Client, Job, Jobs
from elastic.uploader.protocol import Entered, Offer, UploaderConfig, parse_request
from elastic.uploader.save import Saver, report_problem

_MOST_CLIENTS = 64


class Uploader:
    """The process's loop over its socket, its owner's pipe and the results of its saves."""

    def __init__(self, jobs: Jobs, listener: socket.socket, owner_fd: int, clock: Clock) -> None:
        self._jobs = jobs
        self._clock = clock
        self._listener = listener
        self._owner_fd = owner_fd
        self._exit_by: float | None = None
        self._num_clients = 0
        # poll, unlike epoll, takes any descriptor as standard input.
        self._selector = selectors.PollSelector()
        self._watch(jobs.wakeup, jobs.advance)
        self._watch(listener, self._accept)
        self._watch(owner_fd, self._receive_from_owner)

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
            if not ready and self._jobs.is_idle and self._exit_by is not None:
                return True
            if self._exit_by is not None and self._clock.monotonic() >= self._exit_by:
                self._jobs.abandon()
                return False

    def _timeout_s(self) -> float | None:
        if self._jobs.is_idle and self._exit_by is not None:
            return 0.0
        limits = [self._jobs.due_in_s]
        if self._exit_by is not None:
            limits.append(max(0.0, self._exit_by - self._clock.monotonic()))
        return min((limit for limit in limits if limit is not None), default=None)

    def _watch(self, source: int | socket.socket | JsonLineSocket, act: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def _receive_from_owner(self) -> None:
        if not os.read(self._owner_fd, 4096):
            self._selector.unregister(self._owner_fd)
            self._exit_by = self._clock.monotonic() + self._jobs.finish_limit_s + OVERTIME_S

    def _accept(self) -> None:
        client = Client(self._listener.accept()[0])
        if self._num_clients >= _MOST_CLIENTS:
            client.connection.close()
            return
        self._num_clients += 1
        self._watch(client.connection, lambda: self._receive(client))

    def _receive(self, client: Client) -> None:
        try:
            for message in client.connection.receive():
                self._take(client, message)
            is_over = client.connection.has_ended
        except (ValueError, OSError) as error:
            report_problem(f"a client of the uploader is cut off: {error}")
            client.send({"error": str(error)})
            is_over = True
        if is_over:
            self._selector.unregister(client.connection)
            self._num_clients -= 1
            client.connection.close()

    def _take(self, client: Client, message: dict[str, Any]) -> None:
        match parse_request(message):
            case Entered() as request:
                # This loop takes messages one by one, so that the node has entered before a later
                # offer is judged.
                self._jobs.enter(request)
                client.send(message)
            case Offer() as offer:
                self._jobs.add(Job.accept(offer, client.connection.take_fd(), client))


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
    with _listen(config.socket_path) as listener:
        uploader = Uploader(Jobs(saver, config, log, clock), listener, owner_fd, clock)
        ready()
        try:
            return uploader.run()
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
            f"expected a path of at most 100 bytes for the uploader's socket, found {path} ({error})"
        ) from error
    finally:
        os.umask(before)
    listener.listen(_MOST_CLIENTS)
    return listener


def _notify_owner(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)
    # The owner reads this pipe no further: what a library prints later goes to the log.
    os.dup2(2, 1)


def _no_faults(_point: str, _step: int) -> None:
    pass


def _reached(config: UploaderConfig) -> Callable[[str, int], None]:
    """The faults of the run's plan that are injected into this process."""
    mine = tuple(fault for fault in parse(config.faults or "") if isinstance(fault.trigger, AtSave))
    if not mine:
        return _no_faults
    clock = SystemClock()
    log = EventLog(Path(config.events_path), node=config.node, clock=clock)
    faults = FaultInjector(mine, Path(config.faults_path), log, clock)
    return lambda point, step: faults.reach(AtSave(step=step, point=point))


def _with_metrics_upload(
    config: UploaderConfig, reached: Callable[[str, int], None]
) -> Callable[[str, int], None]:
    """Upload the lines of metrics before the checkpoint that holds their steps.

    A node that resumes from the checkpoint elsewhere then finds them in the run directory.
    """
    if config.metrics is None:
        return reached
    metrics = MetricsUpload(
        Path(config.metrics.metrics), config.node, Objects(config.metrics.url, limit_s=PART_LIMIT_S)
    )

    def upload_first(point: str, step: int) -> None:
        if point == "before-commit":
            try:
                metrics.upload(others_upload=True)
            except StoreFailed as error:
                report_problem(f"the metrics up to step {step} are not in the run directory yet: {error}")
        reached(point, step)

    return upload_first


def main(arguments: list[str]) -> int:
    # A terminal's Ctrl-C, or a kill of the whole group, reaches this process too; it leaves when
    # its owner does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        config = UploaderConfig.parse(arguments[0])
        reached = _with_metrics_upload(config, _reached(config))
        is_done = serve(config, 0, reached=reached, ready=lambda: _notify_owner({"ready": True}))
    except UsageError as error:
        _notify_owner({"error": str(error)})
        return EXIT_USAGE
    return EXIT_COMPLETE if is_done else EXIT_FAILED


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stderr.flush()
    # A storage library's threads that hang in a call would hold up an ordinary exit.
    os._exit(exit_code)
