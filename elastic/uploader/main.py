"""A snapshot that was handed over is saved or answered for, whoever offered it and whether or not they still live.

    python -m elastic.uploader.main '{"checkpoints_url": ...}'

One save is in flight, the newest other one waits. Its owner holds its standard input: the end of it means finish and leave.
It does not promise to outlive its owner for longer than its saves may take, and imports no torch, so that it starts at once.
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

from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_USAGE, UsageError
from elastic.faults.grammar import parse
from elastic.faults.inject import FaultInjector
from elastic.faults.plan import AtSave
from elastic.observe.log import EventLog
from elastic.observe.upload import PART_LIMIT_S, MetricsUpload
from elastic.storage.objects import Objects, ObjectsFailed
from elastic.storage.remote import open_store
from elastic.system.clock import Clock, SystemClock
from elastic.system.json_lines import JsonLineSocket
from elastic.uploader.jobs import OVERTIME_S, Client, Job, Work
from elastic.uploader.protocol import Offer, UploaderConfig, entered
from elastic.uploader.save import Saver, complain

_MOST_CLIENTS = 64


class Uploader:
    """The process's loop over its socket, its owner's pipe and the outcomes of its saves."""

    def __init__(self, work: Work, listener: socket.socket, owner_fd: int, clock: Clock) -> None:
        self._work = work
        self._clock = clock
        self._listener = listener
        self._owner_fd = owner_fd
        self._leave_by: float | None = None
        self._num_clients = 0
        # poll, unlike epoll, takes any descriptor as standard input.
        self._selector = selectors.PollSelector()
        self._watch(work.wake, work.take_news)
        self._watch(listener, self._accept)
        self._watch(owner_fd, self._hear_owner)

    def run(self) -> bool:
        """Serve until the owner leaves and everything is done; False when something had to be given up."""
        while True:
            ready = self._selector.select(self._timeout_s())
            for key, _ in ready:
                key.data()
            self._work.check_overdue()
            # Only when nothing was readable is it certain that no offer, made before the end, is still unread.
            if not ready and self._work.is_idle and self._leave_by is not None:
                return True
            if self._leave_by is not None and self._clock.monotonic() >= self._leave_by:
                self._work.give_up()
                return False

    def _timeout_s(self) -> float | None:
        if self._work.is_idle and self._leave_by is not None:
            return 0.0
        limits = [self._work.due_in_s]
        if self._leave_by is not None:
            limits.append(max(0.0, self._leave_by - self._clock.monotonic()))
        return min((limit for limit in limits if limit is not None), default=None)

    def _watch(self, source: int | socket.socket | JsonLineSocket, act: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def _hear_owner(self) -> None:
        if not os.read(self._owner_fd, 4096):
            self._selector.unregister(self._owner_fd)
            self._leave_by = self._clock.monotonic() + self._work.wait_limit_s + OVERTIME_S

    def _accept(self) -> None:
        client = Client(self._listener.accept()[0])
        if self._num_clients >= _MOST_CLIENTS:
            client.connection.close()
            return
        self._num_clients += 1
        self._watch(client.connection, lambda: self._hear(client))

    def _hear(self, client: Client) -> None:
        try:
            for message in client.connection.receive():
                self._take(client, message)
            is_over = client.connection.has_ended
        except (ValueError, OSError) as error:
            complain(f"a client of the uploader is cut off: {error}")
            client.answer({"error": str(error)})
            is_over = True
        if is_over:
            self._selector.unregister(client.connection)
            self._num_clients -= 1
            client.connection.close()

    def _take(self, client: Client, message: dict[str, Any]) -> None:
        generation = entered(message)
        if generation is not None:
            # Before anything that comes later is judged: this loop takes messages one by one.
            self._work.enter(generation)
            client.answer({"entered": generation})
            return
        fd = client.connection.take_fd()
        try:
            offer = Offer.parse(message)
        except ValueError:
            os.close(fd)
            raise
        self._work.add(Job.taken_up(offer, fd, client))


def serve(
    config: UploaderConfig, owner_fd: int, *, reached: Callable[[str, int], None], ready: Callable[[], None]
) -> bool:
    """Run an uploader until the end of `owner_fd`; `ready` is called once clients can connect. Raises UsageError before that.

    `reached` is called with a point of the commit protocol (upload, before-commit, after-commit) and the step.
    """
    clock = SystemClock()
    log = EventLog(Path(config.events_path), node=config.node, clock=clock)
    saver = Saver(open_store(config.checkpoints_url), config, clock, reached)
    with _listen(config.socket_path) as listener:
        uploader = Uploader(Work(saver, config, log, clock), listener, owner_fd, clock)
        ready()
        try:
            return uploader.run()
        finally:
            Path(config.socket_path).unlink(missing_ok=True)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # What a killed predecessor left; the owner never runs two on one path.
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


def _tell_owner(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)
    # Whatever a library prints later belongs to the log, not into a pipe that nobody reads any more.
    os.dup2(2, 1)


def _no_faults(_point: str, _step: int) -> None:
    pass


def _reached(config: UploaderConfig) -> Callable[[str, int], None]:
    """What strikes this process according to the run's fault plan."""
    mine = tuple(fault for fault in parse(config.faults or "") if isinstance(fault.trigger, AtSave))
    if not mine or config.faults_path is None:
        return _no_faults
    clock = SystemClock()
    log = EventLog(Path(config.events_path), node=config.node, clock=clock)
    faults = FaultInjector(mine, Path(config.faults_path), log, clock)
    return lambda point, step: faults.reach(AtSave(step=step, point=point))


def _with_metrics_upload(
    config: UploaderConfig, reached: Callable[[str, int], None]
) -> Callable[[str, int], None]:
    """The lines of the metrics go before the checkpoint that holds their steps: whoever resumes from it elsewhere finds them."""
    if config.diary is None:
        return reached
    metrics = MetricsUpload(
        Path(config.diary.metrics), config.node, Objects(config.diary.url, limit_s=PART_LIMIT_S)
    )

    def upload_first(point: str, step: int) -> None:
        if point == "before-commit":
            try:
                metrics.upload(others_upload=True)
            except ObjectsFailed as error:
                complain(f"the metrics up to step {step} are not in the run directory yet: {error}")
        reached(point, step)

    return upload_first


def main(arguments: list[str]) -> int:
    # A terminal's Ctrl-C, or a kill of the whole group, reaches this process too; it leaves when its owner does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        config = UploaderConfig.parse(arguments[0])
        reached = _with_metrics_upload(config, _reached(config))
        is_done = serve(config, 0, reached=reached, ready=lambda: _tell_owner({"ready": True}))
    except UsageError as error:
        _tell_owner({"error": str(error)})
        return EXIT_USAGE
    return EXIT_COMPLETE if is_done else EXIT_FAILED


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stderr.flush()
    # A storage library's threads that hang in a call would hold up an ordinary exit.
    os._exit(exit_code)
