"""Every accepted offer gets a result as long as the uploader lives, and its slot is given back.

The result comes when its save is over, when a newer offer takes its place, when its storage hangs,
or when the uploader has to leave. A save that was reported as hung has a second result where it is
committed after all, or finds its step committed with another state. It does not promise that a
client receives them: the client may be dead, and its save goes on without it.
"""

import os
import socket
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from queue import SimpleQueue
from typing import Any

from elastic.checkpoint.record import save_limit_s
from elastic.events import CheckpointCommitted, CheckpointDiffers, CheckpointFailed, CheckpointFenced
from elastic.observe.log import EventLog
from elastic.snapshot.slots import SnapshotSlots
from elastic.system.clock import Clock
from elastic.system.json_lines import JsonLineSocket
from elastic.uploader.protocol import Offer, SaveResult, SaveState, UploaderConfig
from elastic.uploader.save import Saver

OVERTIME_S = 5.0
MOST_WAITING = 4
# Of a save beside training, and of the threads that it starts. It cannot be taken back, and a
# thread that gets no processor may hold Python's lock, which the loop needs that takes offers: so
# not 19.
NICENESS = 10


def answer(client: JsonLineSocket, message: dict[str, Any]) -> None:
    # A client that does not read is cut off: it must not hold up the saves of the others.
    try:
        client.send(message, timeout_s=0)
    except OSError:
        with suppress(OSError):
            client.shutdown()


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


def enqueue(waiting: tuple[Job, ...], new: Job) -> tuple[tuple[Job, ...], tuple[Job, ...]]:
    """(what waits now, oldest first; what is dropped) after `new` came.

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
    """The save in flight and those that wait.

    Saves run in a thread; the main thread takes up their results.

    `wakeup` becomes readable when the thread of a save has something for `advance`.
    """

    def __init__(self, saver: Saver, config: UploaderConfig, log: EventLog, clock: Clock) -> None:
        self.saver = saver
        self._fixed_s = config.save_deadline_s + OVERTIME_S
        self._log = log
        self._clock = clock
        self._waiting: tuple[Job, ...] = ()
        self._in_flight: Job | None = None
        self._is_reported = False  # the save in flight
        self.overdue_s = inf  # when it is; once it was reported, when those that wait are
        self._results: SimpleQueue[SaveResult | None] = SimpleQueue()
        self.wakeup, self._waker = socket.socketpair()

    @property
    def is_idle(self) -> bool:
        return self._in_flight is None and not self._waiting

    @property
    def finish_limit_s(self) -> float:
        """How long finishing everything may take."""
        jobs = self._waiting if self._in_flight is None else (*self._waiting, self._in_flight)
        return sum(self._limit_s(job) for job in jobs)

    def add(self, job: Job) -> None:
        self._waiting, dropped = enqueue(self._waiting, job)
        for each in dropped:
            newer = f"the save of step {job.offer.step} took its place"
            reason = newer if each is not job else f"{MOST_WAITING} final saves wait already"
            each.close()
            answer(each.client, asdict(each.offer.result(SaveState.DROPPED, reason)))
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
            self._report(job, job.offer.result(SaveState.FAILED, f"{silence}; saves wait until it does"))
            return
        waiting, self._waiting = self._waiting, ()
        for each in waiting:
            each.close()
            reason = f"{silence} since step {job.offer.step} was saved, whose older checkpoints are deleted"
            self._report(each, each.offer.result(SaveState.FAILED, reason))
        self.overdue_s = self._clock.monotonic() + self._limit_s(job)

    def abandon(self) -> None:
        """Report everything that is not reported yet as failed; the process exits next."""
        unreported = () if self._in_flight is None or self._is_reported else (self._in_flight,)
        for job in (*unreported, *self._waiting):
            # Released but not closed: the thread of the save may still be reading the memory.
            job.release()
            reason = "the uploader had to leave before it was committed"
            self._report(job, job.offer.result(SaveState.FAILED, reason))

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
        result = self.saver.save(job.offer, job.slots)
        # Before old checkpoints are deleted: deleting may hang, and a committed save has not
        # failed.
        self._hand_over(result)
        if result.state is SaveState.COMMITTED:
            self.saver.prune(job.offer)
        self._hand_over(None)

    def _hand_over(self, result: SaveResult | None) -> None:
        self._results.put(result)
        self._waker.send(b"x")

    def _report(self, job: Job, result: SaveResult) -> None:
        in_flight = self._in_flight or job
        self._is_reported, self.overdue_s = True, self._clock.monotonic() + self._limit_s(in_flight)
        self._log.generation = job.offer.generation
        if result.state is SaveState.FAILED:
            self._log.record(CheckpointFailed(step=result.step, reason=result.reason))
        elif result.state is SaveState.DIFFERS:
            self._log.record(CheckpointDiffers(step=result.step, reason=result.reason))
        elif result.state is SaveState.FENCED:
            self._log.record(CheckpointFenced(step=result.step, reason=result.reason))
        elif result.is_ours:
            event = CheckpointCommitted(
                step=result.step,
                size_bytes=job.offer.size_bytes,
                seconds=result.seconds,
                digest=result.digest,
            )
            self._log.record(event)
        answer(job.client, asdict(result))
