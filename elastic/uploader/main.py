"""Every offer that it can read gets a result, and its slot is given back, while the uploader lives.

One save is made at a time. Offers that come meanwhile wait in the socket; of those whose snapshot
is still there then, the last one is saved next, because an older state is worth nothing. Where the
storage hangs, the process begins anew: a save that was reported as failed may be committed all the
same. It does not promise that a client receives a result: the client may be dead, and its save goes
on without it.

The owner holds the uploader's standard input: its end means finish and exit. The uploader does not
promise to outlive its owner for longer than its saves may take. It imports no torch, so that it
starts at once.
"""

import json
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue

from elastic.checkpoint.record import save_limit_s
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, StoreFailed
from elastic.events import CheckpointCommitted, CheckpointDiffers, CheckpointFailed, CheckpointFenced
from elastic.faults.inject import FaultInjector
from elastic.faults.plan import At
from elastic.observe.log import EventLog
from elastic.observe.log_shipper import MetricsShipper
from elastic.snapshot.slots import Snapshot, SnapshotSlots
from elastic.storage.remote import Objects, open_store
from elastic.system import stop_signals
from elastic.system.clock import Clock, SystemClock, share_boot_wall_s
from elastic.system.untrusted import decode
from elastic.uploader.fence import Fence
from elastic.uploader.protocol import MESSAGE_BYTES, Offer, SaveResult, SaveState, UploaderConfig
from elastic.uploader.save import OVERWRITTEN, Saver, report_problem

OVERTIME_S = 5.0
METRICS_LIMIT_S = 10.0  # of a request: the checkpoint waits for it, and the grace may be short
# Of a save beside training, and of the threads that it starts. It cannot be taken back, so each
# save has a thread of its own. Not 19: a thread that gets no processor may hold Python's lock.
NICENESS = 10
_EVENTS = {
    SaveState.FAILED: CheckpointFailed,
    SaveState.DIFFERS: CheckpointDiffers,
    SaveState.FENCED: CheckpointFenced,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A snapshot whose slot is leased. client: where its result is written."""

    offer: Offer
    slots: SnapshotSlots
    snapshot: Snapshot
    client: int

    def close(self) -> None:
        """Let the slot be written again."""
        self.slots.release(self.offer.slot)
        self.slots.close()


@dataclass
class Uploader:
    """offers: where they arrive. owner_fd: at its end once the owner is gone."""

    saver: Saver
    config: UploaderConfig
    log: EventLog
    offers: socket.socket
    owner_fd: int

    def run(self) -> bool:
        """Serve until the owner is gone; whether all is done, and no call of the storage hangs."""
        poll = select.poll()
        for fd in (self.owner_fd, self.offers.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            poll.poll()
            is_over = _is_readable(self.owner_fd)  # first: no offer from before its end is missed
            if (job := self._take_last()) is not None:
                if not self._save(job):
                    return False
            elif is_over:
                return True

    def _take_last(self) -> Job | None:
        """The last of all offers that have arrived; the others have their results."""
        newest: Job | None = None
        while _is_readable(self.offers.fileno()):
            if (job := self._receive()) is None:
                continue
            if newest is not None:
                newest.close()
                reason = f"the save of step {job.offer.step} took its place"
                self._report(newest.offer, newest.client, newest.offer.result(SaveState.DROPPED, reason))
            newest = job
        return newest

    def _receive(self) -> Job | None:
        """None for an offer that has its result, because its slot holds something newer, and for a
        message that is none.
        """
        message, fds, *_ = socket.recv_fds(self.offers, MESSAGE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        try:
            offer = decode(Offer, message, what="the offer")
            memory, client = fds
            slots = SnapshotSlots.attach(os.dup(memory))
            client = os.dup(client)
        except (ValueError, OSError) as error:
            report_problem(f"a client of the uploader is cut off: {error}")
            return None
        finally:
            for fd in fds:
                os.close(fd)
        if (found := slots.lease(offer.slot, offer.seq)) is not None:
            return Job(offer=offer, slots=slots, snapshot=found, client=client)
        slots.close()
        self._report(offer, client, offer.result(SaveState.FAILED, OVERWRITTEN.format(step=offer.step)))
        return None

    def _save(self, job: Job) -> bool:
        """False where the storage hangs: the thread in its call cannot be ended."""
        results: SimpleQueue[SaveResult | None] = SimpleQueue()
        threading.Thread(target=self._run, args=(job, results), daemon=True).start()
        limit_s = save_limit_s(self.config.save_deadline_s + OVERTIME_S, job.snapshot.size_bytes)
        try:
            result = results.get(timeout=limit_s)
            assert result is not None, "the first of the two is the result"
        except Empty:
            job.slots.release(job.offer.slot)  # not closed: the thread may be reading the memory
            reason = "the storage has not answered for longer than a save may take"
            self._report(job.offer, job.client, job.offer.result(SaveState.FAILED, reason))
            return False
        job.close()
        self._report(job.offer, job.client, result)
        with suppress(Empty):
            return results.get(timeout=limit_s) is None
        return False

    def _run(self, job: Job, results: "SimpleQueue[SaveResult | None]") -> None:
        """Its result, and None once old checkpoints are deleted: deleting may hang, and a committed
        save has not failed.
        """
        if not job.offer.is_final:
            # Training comes first. After a final save there is none.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        result = self.saver.save(job.offer, job.slots, job.snapshot)
        results.put(result)
        # Of parts, one node has made the checkpoint.
        if result.state is SaveState.COMMITTED and (result.is_ours or not job.snapshot.info.parts):
            self.saver.prune(job.offer)
        results.put(None)

    def _report(self, offer: Offer, client: int, result: SaveResult) -> None:
        self.log.generation = offer.generation
        if (kind := _EVENTS.get(result.state)) is not None:
            self.log.record(kind(step=result.step, reason=result.reason))
        elif result.is_ours:
            event = CheckpointCommitted(
                step=result.step, size_bytes=result.size_bytes, seconds=result.seconds, digest=result.digest
            )
            self.log.record(event)
        with suppress(OSError):  # the client may be gone
            os.write(client, json.dumps(asdict(result)).encode())
        os.close(client)


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def serve(config: UploaderConfig, owner_fd: int, reached: Callable[[str, int], None] | None = None) -> bool:
    """Run an uploader until the end of `owner_fd`; as `Uploader.run`.

    `reached` is called with a point of the commit protocol (upload, before-commit, after-commit)
    and the step. Raises UsageError for a store that cannot be used.
    """
    clock = SystemClock()
    log = EventLog(config.run.events / f"{config.node}-uploader.jsonl", node=config.node, clock=clock)
    fence = Fence(config.fence, clock, is_orphan=lambda: os.getppid() != config.owner)
    reached = reached or _reached(config, log, clock)
    saver = Saver(open_store(config.run.checkpoints_url), config, fence, clock, reached)
    # Another uploader inherits the descriptor from this one.
    with socket.socket(fileno=os.dup(config.offers)) as offers:
        return Uploader(saver, config, log, offers, owner_fd).run()


def _reached(config: UploaderConfig, log: EventLog, clock: Clock) -> Callable[[str, int], None]:
    """What happens at the points of the commit protocol: the faults of the run's plan that are
    injected into this process, and before the commit the upload of the metrics.

    The lines of metrics are uploaded before the checkpoint that holds their steps. A node that
    resumes from the checkpoint elsewhere then finds them in the run directory.
    """
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
    config = decode(UploaderConfig, arguments[0], what="the uploader's configuration")
    share_boot_wall_s(config.boot_wall_s)
    if serve(config, 0):
        return EXIT_COMPLETE
    if not _is_readable(0):
        # A thread in a call that hangs cannot be ended, and would hold up all later saves.
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - this very command
    return EXIT_FAILED


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stderr.flush()
    # A storage library's threads that hang in a call would hold up an ordinary exit.
    os._exit(exit_code)
