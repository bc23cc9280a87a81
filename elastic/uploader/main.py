"""Every offer gets a result, and its slot is given back, as long as the uploader lives.

    python -m elastic.uploader.main '{"checkpoints_url": ...}'

The result comes when its save is over, when a newer offer takes its place, when its storage hangs,
or when the uploader has to leave. One save is in flight. Of the others the newest waits, and up to
four final ones. A save that was reported as hung has a second result where it is committed after
all, or finds its step committed with another state. It does not promise that a client receives
them: the client may be dead, and its save goes on without it.

The owner holds the uploader's standard input: its end means finish and exit. The uploader does not
promise to outlive its owner for longer than its saves may take. It imports no torch, so that it
starts at once.
"""

import json
import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from elastic.checkpoint.record import save_limit_s
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_USAGE, StoreFailed, UsageError
from elastic.events import CheckpointCommitted, CheckpointDiffers, CheckpointFailed, CheckpointFenced
from elastic.faults.inject import FaultInjector
from elastic.faults.plan import At
from elastic.observe.log import EventLog
from elastic.observe.log_shipper import MetricsShipper
from elastic.snapshot.slots import SnapshotSlots
from elastic.storage.remote import Objects, open_store
from elastic.system import stop_signals
from elastic.system.clock import Clock, SystemClock, share_boot_wall_s
from elastic.system.json_lines import JsonLineSocket
from elastic.uploader.fence import Fence
from elastic.uploader.protocol import Offer, SaveResult, SaveState, UploaderConfig
from elastic.uploader.save import Saver, report_problem

OVERTIME_S = 5.0
MOST_WAITING = 4
METRICS_LIMIT_S = 10.0  # of a request: the checkpoint waits for it, and the grace may be short
# Of a save beside training, and of the threads that it starts. It cannot be taken back, and a
# thread that gets no processor may hold Python's lock, which the loop needs that takes offers: so
# not 19.
NICENESS = 10
_MOST_SOURCES = 67  # 64 clients, and three of our own
_MOST_FDS = 8  # that one client may send ahead of its offers
_EVENTS = {
    SaveState.FAILED: CheckpointFailed,
    SaveState.DIFFERS: CheckpointDiffers,
    SaveState.FENCED: CheckpointFenced,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An offer that was accepted. `is_leased`: the slot is this job's until `release`.

    Without a lease the slot holds something newer already, which shows when the save begins.
    """

    offer: Offer
    slots: SnapshotSlots
    is_leased: bool
    client: JsonLineSocket

    @staticmethod
    def accept(offer: Offer, fd: int, client: JsonLineSocket) -> "Job":
        """Lease the slot, in the memory behind `fd`, which belongs to the job from here on.

        Raises ValueError or OSError when there are no slots behind it.
        """
        slots = SnapshotSlots.attach(fd)
        return Job(offer=offer, slots=slots, is_leased=slots.lease(offer.slot, offer.seq), client=client)

    def release(self) -> None:
        """Let the slot be written again."""
        # Without a lease of its own this job would give back another's, and the writer would
        # overwrite bytes that are being saved.
        if self.is_leased:
            self.slots.release(self.offer.slot)

    def close(self) -> None:
        self.release()
        self.slots.close()

    def answer(self, result: SaveResult) -> None:
        _send(self.client, asdict(result))


def enqueue(waiting: tuple[Job, ...], new: Job) -> tuple[tuple[Job, ...], tuple[Job, ...]]:
    """(the waiting jobs, oldest first; the dropped ones) after `new` came.

    At most one ordinary save waits, the newest, because an older state is worth nothing once a
    newer one can be saved. A final save is never dropped for another. Clients offer few of them:
    rank 0 its last step, again where that failed, and the agent the newest snapshot at a change of
    membership. More than MOST_WAITING are a fault of the clients; then `new` is dropped.
    """
    final = tuple(job for job in waiting if job.offer.is_final)
    if len(final) >= MOST_WAITING:
        return waiting, (new,)
    return (*final, new), tuple(job for job in waiting if not job.offer.is_final)


class Jobs:
    """The save in flight, in a thread, and those that wait.

    `wakeup` becomes readable when that thread has something for `advance`. `overdue_s`: when the
    save in flight is; once it was reported, when those that wait are.
    """

    def __init__(self, saver: Saver, config: UploaderConfig, log: EventLog, clock: Clock) -> None:
        self._saver = saver
        self._fixed_s = config.save_deadline_s + OVERTIME_S
        self._log = log
        self._clock = clock
        self._waiting: tuple[Job, ...] = ()
        self._in_flight: Job | None = None
        self._is_reported = False  # the save in flight
        self.overdue_s = inf
        self._results: SimpleQueue[SaveResult | None] = SimpleQueue()
        self.wakeup, self._waker = socket.socketpair()

    @property
    def _all(self) -> tuple[Job, ...]:
        return self._waiting if self._in_flight is None else (self._in_flight, *self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._all

    @property
    def finish_limit_s(self) -> float:
        """How long finishing everything may take."""
        return sum(self._limit_s(job) for job in self._all)

    def add(self, job: Job) -> None:
        self._waiting, dropped = enqueue(self._waiting, job)
        for each in dropped:
            newer = f"the save of step {job.offer.step} took its place"
            reason = newer if each is not job else f"{MOST_WAITING} final saves wait already"
            each.close()
            each.answer(each.offer.result(SaveState.DROPPED, reason))
        self._start_next()

    def advance(self) -> None:
        """Take up one message of the save in flight: its result, or that its thread has ended."""
        self.wakeup.recv(1)
        result, job = self._results.get(), self._in_flight
        assert job is not None, "a wake-up without a save"
        if result is None:
            self._in_flight, self.overdue_s = None, inf
            self._start_next()
            return
        # Now, and not once old checkpoints are deleted: deleting may hang, and training needs the
        # slot.
        job.close()
        if not self._is_reported or result.state in (SaveState.COMMITTED, SaveState.DIFFERS):
            self._report(job, result)

    def check_overdue(self) -> None:
        """Report a save whose storage call hangs as failed, and later those that wait for it, or
        for the deletion of older checkpoints after it.

        Its thread cannot be stopped. When the call returns, the save's own deadline keeps it from
        creating a commit record, unless that very call has done so.
        """
        job = self._in_flight
        if job is None or self._clock.monotonic() < self.overdue_s:
            return
        silence = f"the storage has not answered for {self._limit_s(job):.0f} s"
        if not self._is_reported:
            self._fail(job, f"{silence}; saves wait until it does")
            return
        waiting, self._waiting = self._waiting, ()
        for each in waiting:
            each.close()
            self._fail(
                each, f"{silence} since step {job.offer.step} was saved, whose older checkpoints are deleted"
            )
        self.overdue_s = self._clock.monotonic() + self._limit_s(job)

    def abandon(self) -> None:
        """Report everything that is not reported yet as failed; the process exits next."""
        for job in self._all:
            if job is self._in_flight and self._is_reported:
                continue
            # Released but not closed: the thread of the save may still be reading the memory.
            job.release()
            self._fail(job, "the uploader had to leave before it was committed")

    def _limit_s(self, job: Job) -> float:
        return save_limit_s(self._fixed_s, job.offer.size_bytes)

    def _start_next(self) -> None:
        if self._in_flight is None and self._waiting:
            job, *rest = self._waiting
            self._waiting, self._in_flight = tuple(rest), job
            self._is_reported, self.overdue_s = False, self._clock.monotonic() + self._limit_s(job)
            save = threading.Thread(target=self._run, args=(job,), daemon=True, name=f"save-{job.offer.step}")
            save.start()

    def _run(self, job: Job) -> None:
        if not job.offer.is_final:
            # Training comes first. After a final save there is none.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        result = self._saver.save(job.offer, job.slots)
        # Before old checkpoints are deleted: deleting may hang, and a committed save has not
        # failed.
        self._hand_over(result)
        if result.state is SaveState.COMMITTED:
            self._saver.prune(job.offer)
        self._hand_over(None)

    def _hand_over(self, result: SaveResult | None) -> None:
        self._results.put(result)
        self._waker.send(b"x")

    def _fail(self, job: Job, reason: str) -> None:
        self._report(job, job.offer.result(SaveState.FAILED, reason))

    def _report(self, job: Job, result: SaveResult) -> None:
        in_flight = self._in_flight or job
        self._is_reported, self.overdue_s = True, self._clock.monotonic() + self._limit_s(in_flight)
        self._log.generation = job.offer.generation
        if (kind := _EVENTS.get(result.state)) is not None:
            self._log.record(kind(step=result.step, reason=result.reason))
        elif result.is_ours:
            event = CheckpointCommitted(
                step=result.step,
                size_bytes=job.offer.size_bytes,
                seconds=result.seconds,
                digest=result.digest,
            )
            self._log.record(event)
        job.answer(result)


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
                self._jobs.add(Job.accept(Offer.parse(message), client.take_fd(), client))
            is_over = client.has_ended
        except ConnectionError:  # a worker that ended, or was killed, before it read its answer
            is_over = True
        except (ValueError, OSError) as error:
            report_problem(f"a client of the uploader is cut off: {error}")
            _send(client, {"error": str(error)})
            is_over = True
        if is_over:
            self._selector.unregister(client)
            client.close()


def _send(client: JsonLineSocket, message: dict[str, Any]) -> None:
    # A client that does not read is cut off: it must not hold up the saves of the others.
    try:
        client.send(message, timeout_s=0)
    except OSError:
        with suppress(OSError):
            client.shutdown()


def serve(
    config: UploaderConfig, owner_fd: int, *, reached: Callable[[str, int], None], ready: Callable[[], None]
) -> bool:
    """Run an uploader until the end of `owner_fd`; `ready` is called once clients can connect.

    `reached` is called with a point of the commit protocol (upload, before-commit, after-commit)
    and the step. Raises UsageError before `ready` for a socket or a store that cannot be used.
    """
    clock = SystemClock()
    log = EventLog(Path(config.events_path), node=config.node, clock=clock)
    try:
        fence = Fence(config.fence, clock, is_orphan=lambda: os.getppid() != config.owner)
    except OSError as error:
        raise UsageError(
            f"expected the memory of an agent at {config.fence}, found none ({error})"
        ) from error
    saver = Saver(open_store(config.checkpoints_url), config, fence, clock, reached)
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
    if config.metrics:
        objects = Objects(config.run_url, limit_s=METRICS_LIMIT_S, first_limit_s=METRICS_LIMIT_S)
        metrics = MetricsShipper(Path(config.metrics), config.node, objects)

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
