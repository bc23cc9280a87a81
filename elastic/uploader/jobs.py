"""Every save that is taken up is answered once it is over, and reported as failed when its storage hangs.

It does not promise that a client hears the answer: it may be dead, and its save goes on without it.
"""

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from elastic.events import CheckpointCommitted, CheckpointFailed, CheckpointFenced
from elastic.observe.log import EventLog
from elastic.snapshot.slots import SnapshotSlots
from elastic.system.clock import Clock
from elastic.system.json_lines import JsonLineSocket
from elastic.uploader.protocol import Offer, UploaderConfig
from elastic.uploader.save import Outcome, Saver, State
from elastic.uploader.save_queue import MOST_WAITING, offered

OVERTIME_S = 5.0
_MOST_FDS = 8


class Client:
    """One connection to the uploader; its offers' descriptors come with it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = JsonLineSocket(connection, most_fds=_MOST_FDS)

    def answer(self, message: dict[str, Any]) -> None:
        # A client that is gone, or does not read, is cut off; it must not hold up anybody's save.
        try:
            self.connection.send(message, timeout_s=0)
        except OSError:
            with suppress(OSError):
                self.connection.shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    offer: Offer
    area: SnapshotSlots  # where the snapshot lies
    is_leased: bool  # the slot is this job's until it lets go; otherwise it holds something newer already
    client: Client

    @staticmethod
    def taken_up(offer: Offer, fd: int, client: "Client") -> "Job":
        """Lease the slot. `fd`, of the area, belongs to the job from here on. Raises ValueError or OSError when it is none.

        A snapshot that is gone already shows when its save begins.
        """
        area = SnapshotSlots.attach(fd)
        return Job(offer=offer, area=area, is_leased=area.lease(offer.slot, offer.seq), client=client)

    @property
    def is_final(self) -> bool:
        return self.offer.is_final

    def answer(self, outcome: Outcome) -> None:
        self.client.answer(
            {
                "step": self.offer.step,
                "state": outcome.state.value,
                "reason": outcome.reason,
                "digest": outcome.digest,
                "cpu_s": outcome.cpu_s,
            }
        )

    def release(self) -> None:
        """The slot may be written again."""
        # A lease that this job did not get is another's: giving it back would let the writer into bytes that are being saved.
        if self.is_leased:
            self.area.release(self.offer.slot)

    def let_go(self) -> None:
        self.release()
        self.area.close()


class Work:
    """What is in flight and what waits. Saves run in a thread; their outcomes are taken up here, in the main thread."""

    def __init__(self, saver: Saver, config: UploaderConfig, log: EventLog, clock: Clock) -> None:
        self._saver = saver
        self._patience_s = config.save_deadline_s + OVERTIME_S
        self._log = log
        self._clock = clock
        self._waiting: tuple[Job, ...] = ()
        self._in_flight: Job | None = None
        self._overdue_at: float | None = None
        self._news: SimpleQueue[Outcome | None] = SimpleQueue()
        self.wake, self._waker = socket.socketpair()

    @property
    def is_idle(self) -> bool:
        return self._in_flight is None and not self._waiting

    @property
    def wait_limit_s(self) -> float:
        """How long finishing everything may take."""
        return self._patience_s * (len(self._waiting) + (self._in_flight is not None))

    @property
    def due_in_s(self) -> float | None:
        return None if self._overdue_at is None else max(0.0, self._overdue_at - self._clock.monotonic())

    def enter(self, generation: int) -> None:
        """See `Saver.enter`."""
        self._saver.enter(generation)

    def add(self, job: Job) -> None:
        self._waiting, dropped = offered(self._waiting, job)
        for each in dropped:
            newer = f"the save of step {job.offer.step} took its place"
            reason = newer if each is not job else f"{MOST_WAITING} final saves wait already"
            each.let_go()
            each.answer(Outcome(state=State.DROPPED, reason=reason))
        self._start_next()

    def take_news(self) -> None:
        """Take up one message of the save in flight: its outcome, or that its thread is free."""
        self.wake.recv(1)
        outcome, job = self._news.get(), self._in_flight
        assert job is not None, "news without a save"
        if outcome is None:
            self._in_flight = None
            self._start_next()
            return
        # Now, not when old checkpoints are deleted too: that may hang, and training wants the slot.
        job.let_go()
        was_reported, self._overdue_at = self._overdue_at is None, None
        if not was_reported or outcome.state is State.COMMITTED:
            self._report(job, outcome)

    def check_overdue(self) -> None:
        """Report a save whose storage call hangs; its thread cannot be stopped, and fences itself when it comes back."""
        job = self._in_flight
        if job is not None and self._overdue_at is not None and self._clock.monotonic() >= self._overdue_at:
            self._overdue_at = None
            reason = f"the storage has not answered for {self._patience_s:.0f} s; saves wait until it does"
            self._report(job, Outcome(state=State.FAILED, reason=reason))

    def give_up(self) -> None:
        unreported = (
            (self._in_flight,) if self._in_flight is not None and self._overdue_at is not None else ()
        )
        for job in (*unreported, *self._waiting):
            # Its thread may be reading still, so that the memory stays open; the process ends next.
            job.release()
            self._report(
                job, Outcome(state=State.FAILED, reason="the uploader had to leave before it was committed")
            )

    def _start_next(self) -> None:
        if self._in_flight is None and self._waiting:
            job, *rest = self._waiting
            self._waiting, self._in_flight = tuple(rest), job
            self._overdue_at = self._clock.monotonic() + self._patience_s
            threading.Thread(
                target=self._run, args=(job,), daemon=True, name=f"save-{job.offer.step}"
            ).start()

    def _run(self, job: Job) -> None:
        outcome = self._saver.save(job.offer, job.area)
        # The commit is told before old checkpoints are deleted: deleting may hang, and a committed save is no failed one.
        self._tell(outcome)
        if outcome.state is State.COMMITTED:
            self._saver.prune(job.offer)
        self._tell(None)

    def _tell(self, news: Outcome | None) -> None:
        self._news.put(news)
        self._waker.send(b"x")

    def _report(self, job: Job, outcome: Outcome) -> None:
        self._log.generation = job.offer.generation
        if outcome.state is State.FAILED:
            self._log.record(CheckpointFailed(step=job.offer.step, reason=outcome.reason))
        elif outcome.state is State.FENCED:
            self._log.record(CheckpointFenced(step=job.offer.step, reason=outcome.reason))
        elif outcome.is_ours:
            event = CheckpointCommitted(
                step=job.offer.step,
                size_bytes=job.offer.size_bytes,
                seconds=outcome.seconds,
                digest=outcome.digest,
            )
            self._log.record(event)
        job.answer(outcome)
