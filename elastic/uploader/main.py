"""Every offer gets a result, and its slot is given back, as long as the uploader lives.

    python -m elastic.uploader.main '{"checkpoints_url": ...}'

The result comes when its save is over, when a newer offer takes its place, when its storage hangs,
or when the uploader has to leave. One save is in flight, and of the others the newest waits. Where
the storage hangs, the process begins anew: a save that was reported as failed may be committed all
the same. It does not promise that a client receives a result: the client may be dead, and its save
goes on without it.

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
from enum import Enum
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
from elastic.snapshot.slots import Snapshot, SnapshotSlots
from elastic.storage.remote import Objects, open_store
from elastic.system import stop_signals
from elastic.system.clock import Clock, SystemClock, share_boot_wall_s
from elastic.uploader.fence import Fence
from elastic.uploader.protocol import MESSAGE_BYTES, Offer, SaveResult, SaveState, UploaderConfig
from elastic.uploader.save import OVERWRITTEN, Saver, report_problem

OVERTIME_S = 5.0
METRICS_LIMIT_S = 10.0  # of a request: the checkpoint waits for it, and the grace may be short
# Of a save beside training, and of the threads that it starts. It cannot be taken back, and a
# thread that gets no processor may hold Python's lock, which the loop needs that takes offers: so
# not 19.
NICENESS = 10
_EVENTS = {
    SaveState.FAILED: CheckpointFailed,
    SaveState.DIFFERS: CheckpointDiffers,
    SaveState.FENCED: CheckpointFenced,
}


class End(Enum):
    """How an uploader ends: everything is saved, or saves had to be abandoned; or a call of the
    storage hangs, which only another process can do without.
    """

    FINISHED, ABANDONED, HUNG = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A snapshot whose slot is leased until `close`."""

    offer: Offer
    slots: SnapshotSlots
    snapshot: Snapshot
    client: socket.socket

    @staticmethod
    def accept(offer: Offer, fd: int, client: socket.socket) -> "Job | None":
        """Lease the slot, in the memory behind `fd`, which belongs to the job from here on.

        None where the slot holds something newer already. Raises ValueError or OSError when there
        are no slots behind it.
        """
        os.set_inheritable(fd, False)
        slots = SnapshotSlots.attach(fd)
        if slots.lease(offer.slot, offer.seq):
            found = slots.find(offer.slot, offer.seq)
            if found is not None and (found.info.step, found.info.generation) == (
                offer.step,
                offer.generation,
            ):
                return Job(offer=offer, slots=slots, snapshot=found, client=client)
            slots.release(offer.slot)
        slots.close()
        return None

    def close(self) -> None:
        """Let the slot be written again."""
        self.slots.release(self.offer.slot)
        self.slots.close()


class Jobs:
    """The save in flight, in a thread, and the waiting one: the newest, because an older state
    is worth nothing once a newer one can be saved.

    `wakeup` becomes readable when that thread has something for `advance`.
    """

    def __init__(self, saver: Saver, config: UploaderConfig, log: EventLog, clock: Clock) -> None:
        self._saver = saver
        self._fixed_s = config.save_deadline_s + OVERTIME_S
        self._log = log
        self._clock = clock
        self._waiting: Job | None = None
        self._in_flight: Job | None = None
        self._is_answered = False  # the save in flight, whose thread deletes old checkpoints now
        self.overdue_s = inf  # when the save in flight is, or its deletions are
        self._results: SimpleQueue[SaveResult | None] = SimpleQueue()
        self.wakeup, self._waker = socket.socketpair()

    @property
    def is_idle(self) -> bool:
        return self._in_flight is None

    @property
    def finish_limit_s(self) -> float:
        """How long finishing everything may take."""
        return sum(self._limit_s(job) for job in (self._in_flight, self._waiting) if job is not None)

    def offer(self, offer: Offer, fd: int, client: socket.socket) -> None:
        """Raises ValueError or OSError as `Job.accept`."""
        if (job := Job.accept(offer, fd, client)) is None:
            self._report(offer, client, offer.result(SaveState.FAILED, OVERWRITTEN.format(step=offer.step)))
            return
        if (old := self._waiting) is not None:
            old.close()
            reason = f"the save of step {offer.step} took its place"
            self._report(old.offer, old.client, old.offer.result(SaveState.DROPPED, reason))
        self._waiting = job
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
        # Now, and not once old checkpoints are deleted: training needs the slot.
        job.close()
        self._is_answered, self.overdue_s = True, self._clock.monotonic() + self._limit_s(job)
        self._report(job.offer, job.client, result, size_bytes=job.snapshot.size_bytes)

    def abandon(self, reason: str) -> None:
        """Report everything that is not reported yet as failed; the process exits next.

        The thread of a save cannot be stopped before. A commit record that it creates all the same
        names a whole payload.
        """
        for job in (None if self._is_answered else self._in_flight, self._waiting):
            if job is not None:
                # Released but not closed: the thread of the save may still be reading the memory.
                job.slots.release(job.offer.slot)
                self._report(job.offer, job.client, job.offer.result(SaveState.FAILED, reason))

    def _limit_s(self, job: Job) -> float:
        return save_limit_s(self._fixed_s, job.snapshot.size_bytes)

    def _start_next(self) -> None:
        if self._in_flight is None and (job := self._waiting) is not None:
            self._waiting, self._in_flight = None, job
            self._is_answered, self.overdue_s = False, self._clock.monotonic() + self._limit_s(job)
            name = f"save-{job.offer.step}"
            threading.Thread(target=self._run, args=(job,), daemon=True, name=name).start()

    def _run(self, job: Job) -> None:
        if not job.offer.is_final:
            # Training comes first. After a final save there is none.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        result = self._saver.save(job.offer, job.slots, job.snapshot)
        # Before old checkpoints are deleted: deleting may hang, and a committed save has not
        # failed.
        self._hand_over(result)
        if result.state is SaveState.COMMITTED:
            self._saver.prune(job.offer)
        self._hand_over(None)

    def _hand_over(self, result: SaveResult | None) -> None:
        self._results.put(result)
        self._waker.send(b"x")

    def _report(
        self, offer: Offer, client: socket.socket, result: SaveResult, *, size_bytes: int = 0
    ) -> None:
        self._log.generation = offer.generation
        if (kind := _EVENTS.get(result.state)) is not None:
            self._log.record(kind(step=result.step, reason=result.reason))
        elif result.is_ours:
            event = CheckpointCommitted(
                step=result.step, size_bytes=size_bytes, seconds=result.seconds, digest=result.digest
            )
            self._log.record(event)
        with client, suppress(OSError):  # the client may be gone
            client.send(json.dumps(asdict(result)).encode(), socket.MSG_DONTWAIT)


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

    def run(self) -> End:
        """Serve until the owner is gone and everything is done, or as long as the storage does not
        hang.
        """
        while True:
            ready = self._selector.select(self._timeout_s())
            for key, _ in ready:
                key.data()
            # Only when nothing was readable is it certain that no offer from before the owner's end
            # is unread.
            if not ready and self._is_finished():
                return End.FINISHED
            now_s = self._clock.monotonic()
            if now_s >= self._exit_by:
                self._jobs.abandon("the uploader had to leave before it was committed")
                return End.ABANDONED
            if now_s >= self._jobs.overdue_s:
                self._jobs.abandon("the storage has not answered for longer than a save may take")
                return End.HUNG if self._exit_by == inf else End.ABANDONED

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
        client, _ = self._listener.accept()
        self._selector.register(client, selectors.EVENT_READ, lambda: self._receive(client))

    def _receive(self, client: socket.socket) -> None:
        """Its offer, after which nothing more comes from it."""
        self._selector.unregister(client)
        message, descriptors = b"", list[int]()
        try:
            message, descriptors, _, _ = socket.recv_fds(client, MESSAGE_BYTES, 1)
            offer = Offer.parse(message)
            self._jobs.offer(offer, descriptors.pop(), client)
        except (ValueError, IndexError, OSError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            client.close()
            if message:  # else it was killed before it made its offer
                report_problem(f"a client of the uploader is cut off: {error}")


def serve(
    config: UploaderConfig, owner_fd: int, *, reached: Callable[[str, int], None], ready: Callable[[], None]
) -> End:
    """Run an uploader until the end of `owner_fd`; `ready` is called once clients can connect.

    `reached` is called with a point of the commit protocol (upload, before-commit, after-commit)
    and the step. Raises UsageError before `ready` for a socket or a store that cannot be used.
    """
    clock = SystemClock()
    log = EventLog(config.events, node=config.node, clock=clock)
    try:
        fence = Fence(config.fence, clock, is_orphan=lambda: os.getppid() != config.owner)
    except OSError as error:
        raise UsageError(
            f"expected the memory of an agent at {config.fence}, found none ({error})"
        ) from error
    saver = Saver(open_store(config.run.checkpoints_url), config, fence, clock, reached)
    jobs = Jobs(saver, config, log, clock)
    with _listen(config.socket_path) as listener:
        ready()
        try:
            return Uploader(jobs, listener, owner_fd, clock).run()
        finally:
            Path(config.socket_path).unlink(missing_ok=True)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
    listener.listen()
    return listener


def _notify_owner(message: dict[str, Any]) -> None:
    if os.path.sameopenfile(1, 2):
        return  # the owner was told before the storage hung
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
    log = EventLog(config.events, node=config.node, clock=clock)
    faults = FaultInjector(config.faults or "", config.run.faults, log, clock)
    metrics = None
    if config.run.is_remote:
        objects = Objects(config.run_url, limit_s=METRICS_LIMIT_S, first_limit_s=METRICS_LIMIT_S)
        metrics = MetricsShipper(config.run.metrics_of(config.node), config.node, objects)

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
        end = serve(config, 0, reached=_reached(config), ready=lambda: _notify_owner({"ready": True}))
    except UsageError as error:
        _notify_owner({"error": str(error)})
        return EXIT_USAGE
    if end is End.HUNG:
        # A thread in a call that hangs cannot be ended, and would hold up all later saves.
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - this very command
    return EXIT_COMPLETE if end is End.FINISHED else EXIT_FAILED


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stderr.flush()
    # A storage library's threads that hang in a call would hold up an ordinary exit.
    os._exit(exit_code)
