"""Each save ends in one result with a reason, whatever its storage does.

A snapshot is hashed while it is written, and the commit record has the hashes of what was
published. Deleting old checkpoints never changes the result of a save. It does not promise to
return in time: a storage call that hangs holds its thread, and main.py watches the deadline.
"""

import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import numpy as np

from elastic.checkpoint.commit import Committed, WriteLimits, commit
from elastic.checkpoint.commit_parts import OfferedPart, PartsCommit
from elastic.checkpoint.prune import prune
from elastic.checkpoint.record import Hashes, Save, save_limit_s
from elastic.config.run_dir import UID
from elastic.errors import CheckpointDamaged, Fenced, StoreFailed
from elastic.snapshot.checksum import ImageChecksum
from elastic.snapshot.image_hash import ImageHash, Task, in_memory, run_all
from elastic.snapshot.slots import Snapshot, SnapshotSlots
from elastic.storage.remote import open_store
from elastic.storage.store import Payload, Store, read_small
from elastic.system.clock import Clock, processor_s
from elastic.uploader.fence import Fence
from elastic.uploader.protocol import Offer, SaveResult, SaveState, UploaderConfig

OVERWRITTEN = "the snapshot of step {step} was written over before it was saved"


@dataclass
class Saver:
    """reached: called with a point of the commit protocol and the step, where faults can be
    injected.
    """

    store: Store
    config: UploaderConfig
    fence: Fence
    clock: Clock
    reached: Callable[[str, int], None]
    _run_dir: Store | None = None
    _difference: str = ""  # why nothing more is saved
    _asking: Lock = field(default_factory=Lock)

    def save(self, offer: Offer, slots: SnapshotSlots, snapshot: Snapshot) -> SaveResult:
        """slots: where the snapshot lies, with a lease that the caller holds."""
        began_s, cpu_began_s = self.clock.monotonic(), processor_s()
        if self._difference:
            return offer.result(SaveState.DIFFERS, self._difference)
        try:
            done = self._commit(offer, slots, snapshot, began_s)
        except Fenced as error:
            return offer.result(SaveState.FENCED, str(error))
        except (StoreFailed, CheckpointDamaged) as error:
            return offer.result(SaveState.FAILED, str(error))
        except Exception as error:
            # The edge of a thread: a save that ended here without a result would never be answered.
            report_problem(traceback.format_exc())
            return offer.result(SaveState.FAILED, f"{type(error).__name__}: {error}")
        if done.difference:
            # Later states follow from this one. The next offer's client learns of it too: the agent
            # may have offered this one, and waits for no result.
            self._difference = f"{done.difference}. Nothing more is saved"
            report_problem(self._difference)
            return offer.result(SaveState.DIFFERS, self._difference)
        if done.is_ours:
            self.fence.record_commit(offer.step)
        return SaveResult(
            step=offer.step,
            state=SaveState.COMMITTED,
            is_ours=done.is_ours,
            seconds=self.clock.monotonic() - began_s,
            digest=done.record.digest,
            cpu_s=processor_s() - cpu_began_s,
            size_bytes=done.record.size_bytes,
        )

    def _commit(self, offer: Offer, slots: SnapshotSlots, snapshot: Snapshot, began_s: float) -> Committed:
        size_bytes, info = snapshot.size_bytes, snapshot.info
        body, at = slots.body(offer.slot), slots.offset(offer.slot)
        save = Save(run_id=self.config.run_id, step=offer.step, generation=offer.generation)

        def is_fenced() -> bool:
            # The writer asks before each of its steps, the last time right before it creates the
            # commit record. The lease can be lost meanwhile, when the owner takes this uploader for
            # dead: then the payload may hold bytes of two snapshots, and must not be committed.
            with self._asking:  # of several parts at once
                if not slots.is_whole(offer.slot, offer.seq):
                    raise StoreFailed(OVERWRITTEN.format(step=offer.step))
                self._check_run_dir()
                return not self.fence.admits(offer.generation)

        limit_s = save_limit_s(self.config.save_deadline_s, size_bytes)
        limits = WriteLimits(deadline=began_s + limit_s, is_fenced=is_fenced)
        offered = [
            OfferedPart(
                number=part.number,
                payload=Payload(fd=slots.fd, offset=at + part.start, size_bytes=part.size_bytes),
                hashes=partial(hashes_of, body[part.start : part.end], part.checksum, offer.step),
                is_copy=part.is_copy,
            )
            for part in snapshot.images
        ]
        if info.parts:
            parts_commit = PartsCommit(
                store=self.store,
                save=save,
                of=info.of,
                checksum=info.checksum,
                has_digest=offer.wants_digest,
                limits=limits,
                clock=self.clock,
                reached=lambda point: self.reached(point, offer.step),
            )
            return parts_commit.commit(offered)
        # Leaving it waits for the hash, also where the save fails.
        with ThreadPoolExecutor(1, f"hash-{offer.step}") as thread:
            return commit(
                self.store,
                offered[0].payload,
                save,
                limits=limits,
                clock=self.clock,
                reached=lambda point: self.reached(point, offer.step),
                hashed=thread.submit(offered[0].hashes).result,
            )

    def _check_run_dir(self) -> None:
        """Raises StoreFailed where another run has the name of a directory that was set aside.

        In etcd its group is another one, which fences nothing here.
        """
        config = self.config
        if not config.uid:
            return
        self._run_dir = self._run_dir or open_store(config.run_url)
        if read_small(self._run_dir, UID, self.clock) not in (None, config.uid.encode()):
            raise StoreFailed(
                f"{config.run_url} was set aside or moved, and another run has begun there; nothing of this one is saved in it"
            )

    def prune(self, offer: Offer) -> None:
        """Delete old checkpoints after `offer` was committed; report problems, never raise them."""
        try:
            prune(
                self.store,
                self.clock,
                run_id=self.config.run_id,
                keep=self.config.keep,
                step=offer.step,
                generation=offer.generation,
                resumed_from=offer.resumed_from,
                is_newest=lambda: self.fence.is_newest(offer.generation),
            )
        except Fenced:
            # The group that goes on deletes them after its next commit.
            pass
        except Exception as error:
            # The checkpoint is committed. An old one left behind must not turn that into a failure,
            # nor end this thread before it reports that it is free.
            report_problem(
                f"old checkpoints could not be deleted ({error}); trying again after the next save"
            )


def hashes_of(image: memoryview, published: str, step: int) -> Hashes:
    """image: uint8 [size_bytes], in a slot that is leased. published: its checksum as a snapshot,
    "" if that is not known.

    Raises StoreFailed where the image is not what was published, CheckpointDamaged where it is
    none.
    """
    hashes, checksum = ImageHash(in_memory(image), image.nbytes), ImageChecksum(image.nbytes)

    def summed() -> Task:
        for offset, piece in checksum.pieces(0, np.frombuffer(image, dtype=np.uint8)):
            checksum.add(offset, piece)
            yield

    run_all([summed(), *hashes.tasks()])
    if published not in ("", checksum.hexdigest()):
        raise StoreFailed(f"the snapshot of step {step} changed in memory before it was saved")
    return Hashes(digest=hashes.digest(), sha256=hashes.parts_sha256(), checksum=checksum.hexdigest())


def report_problem(text: str) -> None:
    """Print to standard error. Its reader may be dead, and that must not end a save."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
