"""Each save ends in one outcome with a reason, whatever its storage does, and pruning never changes that outcome.

It does not promise to return in time: a hung storage call holds its thread, and the deadline is watched from outside.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from elastic.checkpoint.commit import Committed, WriteLimits, commit
from elastic.checkpoint.prune import Pruner, RetentionPolicy
from elastic.checkpoint.record import Save
from elastic.errors import CheckpointDamaged, Fenced, StoreFailed
from elastic.snapshot import checksum, safetensors_header
from elastic.snapshot.slots import SnapshotSlots
from elastic.storage.store import Payload, Store
from elastic.system.clock import Clock
from elastic.uploader.fence import open_fence
from elastic.uploader.protocol import Offer, UploaderConfig

ENTERING_S = 1.0
GONE = "the snapshot of step {step} was written over before it was saved"


class State(Enum):
    COMMITTED = "committed"
    FAILED = "failed"
    DROPPED = "dropped"  # a newer save took its place
    FENCED = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`is_ours`: this save wrote the checkpoint; otherwise, when committed, another writer had done so before.

    digest: of the state that is committed, in hexadecimal. cpu_s: seconds of processor that this process took meanwhile.
    """

    state: State
    reason: str
    is_ours: bool = False
    seconds: float = 0.0
    digest: str = ""
    cpu_s: float = 0.0


class Saver:
    def __init__(
        self, store: Store, config: UploaderConfig, clock: Clock, reached: Callable[[str, int], None]
    ) -> None:
        """reached: called with a point of the commit protocol and the step, where faults can be injected."""
        self._store = store
        self._config = config
        self._clock = clock
        self._reached = reached
        policy = RetentionPolicy(
            run_id=config.run_id,
            keep=config.keep,
            every=config.every,
            save_deadline_s=config.save_deadline_s,
        )
        self._pruning = Pruner(store, policy, clock)
        self._membership = threading.Condition()
        self._entered = config.entered
        self._fence = open_fence(config.fence)

    def enter(self, generation: int) -> None:
        """Let this node, a member of `generation`, save what it has of older ones: `generation` does not fence it, a newer one does.

        It is right because the agent killed its older workers before it entered, and because the state that they left lies on the trajectory, which is the same
        whoever trains it. A node that is no member never says so.
        """
        with self._membership:
            self._entered = max(self._entered, generation)
            self._membership.notify_all()

    def save(self, offer: Offer, area: SnapshotSlots) -> Outcome:
        """area: where the snapshot lies, leased by whoever calls."""
        began_at, cpu_began_s = self._clock.monotonic(), time.process_time()
        try:
            done = self._commit(offer, area, began_at)
        except Fenced as error:
            return Outcome(state=State.FENCED, reason=str(error))
        except (StoreFailed, CheckpointDamaged) as error:
            return Outcome(state=State.FAILED, reason=str(error))
        except Exception as error:
            # This is the edge of a thread: a save that ended without an outcome would be waited for for ever.
            complain(traceback.format_exc())
            return Outcome(state=State.FAILED, reason=f"{type(error).__name__}: {error}")
        return Outcome(
            state=State.COMMITTED,
            reason=done.reason,
            is_ours=done.is_ours,
            seconds=self._clock.monotonic() - began_at,
            digest=done.record.digest,
            cpu_s=time.process_time() - cpu_began_s,
        )

    def _commit(self, offer: Offer, area: SnapshotSlots, began_at: float) -> Committed:
        snapshot = area.find(offer.slot, offer.seq)
        if snapshot is None or (snapshot.offset, snapshot.size_bytes) != (offer.offset, offer.size_bytes):
            raise StoreFailed(GONE.format(step=offer.step))
        body = area.body(offer.slot)[: offer.size_bytes]
        known = snapshot.about.get("checksum")
        if known is not None and known != checksum.of_image(body):
            raise StoreFailed(f"the snapshot of step {offer.step} changed in memory before it was saved")
        digest, _ = safetensors_header.digest(body)
        save = Save(
            run_id=self._config.run_id,
            step=offer.step,
            epoch=offer.epoch,
            generation=offer.generation,
            digest=digest,
            world_size=offer.world_size,
            torch=offer.torch,
        )

        def is_fenced() -> bool:
            # Looked at whenever the writer asks whether it may go on, the last time right before the commit record.
            if not area.is_whole(offer.slot, offer.seq):
                raise StoreFailed(GONE.format(step=offer.step))
            return self._is_fenced(offer.generation)

        return commit(
            self._store,
            Payload(fd=area.fd, offset=offer.offset, size_bytes=offer.size_bytes),
            save,
            limits=WriteLimits(deadline=began_at + self._config.save_deadline_s, is_fenced=is_fenced),
            clock=self._clock,
            reached=lambda point: self._reached(point, offer.step),
        )

    def _is_fenced(self, generation: int) -> bool:
        """Whether a newer generation exists, and this node has not said, nor says soon, that it is in it: it is formed a moment before its members enter."""
        with self._membership:
            return not self._membership.wait_for(
                lambda: self._fence.newest() <= max(generation, self._entered), ENTERING_S
            )

    def prune(self, offer: Offer) -> None:
        """Delete what the policy does not keep, after `offer` was committed; what goes wrong is only said."""
        try:
            self._pruning.after_commit(generation=offer.generation, resumed_from=offer.resumed_from)
        except Exception as error:
            # The checkpoint is committed; an old one that stays must not turn it into a failure, nor end this thread unseen.
            complain(f"old checkpoints could not be deleted ({error}); trying again after the next save")


def complain(text: str) -> None:
    """For people, on standard error; whoever read it may be dead, and that must not end a save."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
