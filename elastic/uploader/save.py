"""Each save ends in one result with a reason, whatever its storage does.

Deleting old checkpoints never changes that result. It does not promise to return in time: a storage
call that hangs holds its thread, and `Jobs` watches the deadline.
"""

import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

from elastic.checkpoint.commit import Committed, WriteLimits, commit
from elastic.checkpoint.prune import Pruner, RetentionPolicy
from elastic.checkpoint.record import Save, save_limit_s
from elastic.config.run_dir import UID
from elastic.errors import CheckpointDamaged, Fenced, StoreFailed
from elastic.snapshot.slots import SnapshotSlots
from elastic.storage.remote import open_store
from elastic.storage.store import Payload, Store, StoreUnavailable, read_small, retrying
from elastic.system.clock import Clock, processor_s
from elastic.uploader.fence import MirrorStale, NewestGeneration, open_fence
from elastic.uploader.hash_beside import hash_beside
from elastic.uploader.protocol import Offer, SaveResult, SaveState, UploaderConfig

# From the moment when a generation is formed: to its members' next look at the group, and the
# connection to its TCPStore.
ENTERING_S = 1.0
FENCE_PATIENCE_S = 5.0
OVERWRITTEN = "the snapshot of step {step} was written over before it was saved"


class _FenceRemoved(StoreUnavailable):
    """The fence shows no generation."""


class Saver:
    def __init__(
        self, store: Store, config: UploaderConfig, clock: Clock, reached: Callable[[str, int], None]
    ) -> None:
        """reached: called with a point of the commit protocol and the step, where faults can be
        injected.
        """
        self._store = store
        self._config = config
        self._clock = clock
        self._reached = reached
        policy = RetentionPolicy(
            run_id=config.run_id, keep=config.keep, save_deadline_s=config.save_deadline_s
        )
        self._pruner = Pruner(store, policy, clock)
        self._membership = threading.Condition()
        self._entered = config.entered
        self._fence = open_fence(config.fence)
        self._fence_of_deletion = open_fence(config.fence, must_be_fresh=True)
        self._run_dir: Store | None = None
        self._difference = ""  # why nothing more is saved

    def enter(self, generation: int) -> None:
        """Let saves of older generations go on now that this node is a member of `generation`.

        Without this every change of membership would fence the save in hand, although its state is
        good. It is safe for two reasons. The agent killed the workers of the older generation
        before it entered this one, so nothing of theirs is written any more. And their state lies
        on the run's one trajectory, which does not depend on who trains it. A node that is not a
        member of the newest generation never says that it is. If it was evicted, its saves are
        fenced until it has joined again; then they go on as those of any member.
        """
        with self._membership:
            self._entered = max(self._entered, generation)
            self._membership.notify_all()

    def save(self, offer: Offer, slots: SnapshotSlots) -> SaveResult:
        """slots: where the snapshot lies, with a lease that the caller holds."""
        began_s, cpu_began_s = self._clock.monotonic(), processor_s()
        if self._difference:
            return offer.result(SaveState.DIFFERS, self._difference)
        try:
            done = self._commit(offer, slots, began_s)
        except Fenced as error:
            return offer.result(SaveState.FENCED, str(error))
        except (StoreFailed, CheckpointDamaged) as error:
            return offer.result(SaveState.FAILED, str(error))
        except Exception as error:
            # The edge of a thread: a save that ended here without a result would never be answered.
            report_problem(traceback.format_exc())
            return offer.result(SaveState.FAILED, f"{type(error).__name__}: {error}")
        if done.differs:
            # Later states follow from this one. The next offer's client learns of it too: the agent
            # may have offered this one, and waits for no result.
            self._difference = f"{done.reason}. Nothing more is saved"
            report_problem(self._difference)
            return offer.result(SaveState.DIFFERS, self._difference)
        return SaveResult(
            step=offer.step,
            state=SaveState.COMMITTED,
            reason=done.reason,
            is_ours=done.is_ours,
            seconds=self._clock.monotonic() - began_s,
            digest=done.record.digest,
            cpu_s=processor_s() - cpu_began_s,
        )

    def _commit(self, offer: Offer, slots: SnapshotSlots, began_s: float) -> Committed:
        snapshot = slots.find(offer.slot, offer.seq)
        if snapshot is None or (snapshot.offset, snapshot.size_bytes) != (offer.offset, offer.size_bytes):
            raise StoreFailed(OVERWRITTEN.format(step=offer.step))
        image = slots.body(offer.slot)[: offer.size_bytes]
        save = Save(
            run_id=self._config.run_id,
            step=offer.step,
            epoch=offer.epoch,
            generation=offer.generation,
            world_size=offer.world_size,
            torch=offer.torch,
        )

        def is_fenced() -> bool:
            # The writer asks before each of its steps, the last time right before it creates the
            # commit record. The lease can be lost meanwhile, when the owner takes this uploader for
            # dead: then the payload may hold bytes of two snapshots, and must not be committed.
            if not slots.is_whole(offer.slot, offer.seq):
                raise StoreFailed(OVERWRITTEN.format(step=offer.step))
            self._check_run_dir()
            return self._is_fenced(offer.generation)

        limit_s = save_limit_s(self._config.save_deadline_s, offer.size_bytes)
        with hash_beside(image, snapshot.info) as hashed:
            return commit(
                self._store,
                Payload(fd=slots.fd, offset=offer.offset, size_bytes=offer.size_bytes),
                save,
                limits=WriteLimits(deadline=began_s + limit_s, is_fenced=is_fenced),
                clock=self._clock,
                reached=lambda point: self._reached(point, offer.step),
                hashed=hashed,
            )

    def _check_run_dir(self) -> None:
        """Raises StoreFailed where another run has the name of a directory that was set aside.

        In etcd that run has a group of its own, which fences nothing of this one.
        """
        config = self._config
        if not config.uid:
            return
        self._run_dir = self._run_dir or open_store(config.run_url)
        if read_small(self._run_dir, UID, self._clock) not in (None, config.uid.encode()):
            raise StoreFailed(
                f"{config.run_url} was set aside or moved, and another run has begun there; nothing of this one is saved in it"
            )

    def _is_fenced(self, generation: int) -> bool:
        """Whether a newer generation exists of which this node is not a member.

        A generation is formed a moment before its members enter it, so a newer one fences only if
        this node has not entered it within ENTERING_S.
        """
        # An object store may take half a minute to show the fence. It is read without the lock,
        # which `enter` needs: that runs in the loop that also takes offers. After each wait the
        # fence is read again, because a still newer generation may have been formed meanwhile.
        while (newest := self._newest_generation(self._fence, generation)) > max(generation, self._entered):
            if not self._wait_until_entered(newest):
                return True
        return False

    def _newest_generation(self, fence: NewestGeneration, known: int) -> int:
        """What the fence shows, which was raised before `known`, a generation of 1 or more, began.

        Raises StoreFailed where it shows nothing: it was removed, and its next number may be any.
        Then the save fails, long before its deadline: who waits for it at the end of a node writes
        the number before the next try. Raises what the fence raises.
        """

        def shown() -> int:
            newest = fence()
            if not newest and known and self._config.fence is not None:
                raise _FenceRemoved(
                    f"expected {self._config.fence} to show generation {known} or a newer one, found none: it was removed; "
                    "nothing is committed until an agent has written it again"
                )
            return newest

        # A poll of an agent, or of its mirror, is a fraction of a second away.
        try:
            return retrying(shown, clock=self._clock, deadline=self._clock.monotonic() + FENCE_PATIENCE_S)
        except _FenceRemoved as error:
            raise StoreFailed(str(error)) from error

    def _wait_until_entered(self, generation: int) -> bool:
        with self._membership:
            return self._membership.wait_for(lambda: generation <= self._entered, ENTERING_S)

    def prune(self, offer: Offer) -> None:
        """Delete old checkpoints after `offer` was committed; report problems, never raise them.

        None is deleted while it is not known which generation is the newest.
        """

        def is_newest() -> bool:
            with suppress(MirrorStale):
                return self._newest_generation(self._fence_of_deletion, offer.generation) <= offer.generation
            return False

        try:
            self._pruner.after_commit(
                step=offer.step,
                generation=offer.generation,
                resumed_from=offer.resumed_from,
                is_newest=is_newest,
            )
        except Fenced:
            # The group that goes on deletes them after its next commit.
            pass
        except Exception as error:
            # The checkpoint is committed. An old one that stays must not turn that into a failure,
            # nor end this thread before it reports that it is free.
            report_problem(
                f"old checkpoints could not be deleted ({error}); trying again after the next save"
            )


def report_problem(text: str) -> None:
    """Print to standard error. Its reader may be dead, and that must not end a save."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
