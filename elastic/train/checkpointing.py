"""Rank 0 says when a snapshot is to become a checkpoint, hands it to the uploader and trains on; what became of it comes back later.

One save is under way at a time: a later one that is due waits for its answer, because a slot that is being uploaded cannot be written. A save that fails is reported and never
stops training. It does not retry: that is the uploader's business.
"""

import os
from dataclasses import dataclass

from elastic.config.durations import Every
from elastic.errors import StoreFailed
from elastic.system.clock import Clock
from elastic.train.save_policy import is_due
from elastic.train.snapshotting import PublishedSnapshot
from elastic.uploader.client import UploaderClient
from elastic.uploader.protocol import SaveResult, SaveState

FINAL_SAVE_S = 600.0
GUESSED_COST_S = 0.03  # until a generation that goes on from memory has saved once: an interval of ten seconds, so that uploads do not compete with a recovery


@dataclass(slots=True, kw_only=True)
class Cost:
    """What the last save took: seconds of training, and of the uploader's processor."""

    training_s: float
    uploader_s: float = 0.0

    @property
    def total_s(self) -> float:
        # On a machine whose processors are all busy, each second of the uploader's is taken from one of them.
        return self.training_s + self.uploader_s / (os.cpu_count() or 1)


class Checkpointing:
    def __init__(self, uploads: UploaderClient, every: Every, clock: Clock) -> None:
        self._uploads = uploads
        self._every = every
        self._clock = clock
        self.resumed_from: int | None = None  # step of the checkpoint that this generation went on from
        self.digest = ""  # of the last one that was committed
        self._last_at = clock.monotonic()
        self._cost: Cost | None = None
        self._under_way: int | None = None
        self._is_overdue = False

    def resume(self, *, has_checkpoint: bool, resumed_from: int | None) -> None:
        """A young run saves at its first step, to have something to fall back to; one that goes on from its memory has time."""
        self.resumed_from = resumed_from
        if has_checkpoint:
            self._cost = Cost(training_s=GUESSED_COST_S)

    def is_due(self, step: int) -> bool:
        self._hear()
        since_s = self._clock.monotonic() - self._last_at
        cost_s = None if self._cost is None else self._cost.total_s
        self._is_overdue |= is_due(self._every, step=step, since_s=since_s, cost_s=cost_s)
        return self._is_overdue and self._under_way is None

    def save(
        self, taken: PublishedSnapshot | None, step: int, *, began_at: float, final: bool = False
    ) -> None:
        """Offer a snapshot. `began_at`, on the monotonic clock: when this save began to cost training time."""
        self._hear()
        self._last_at, self._is_overdue = began_at, False
        try:
            if taken is None:
                raise StoreFailed("there is no memory for a copy of the state")
            self._uploads.offer(taken.area, taken.snapshot, resumed_from=self.resumed_from, final=final)
            self._under_way = step
        except (OSError, StoreFailed) as error:
            print(f"checkpoint step={step} is not saved: {error}; training goes on")
        self._cost = Cost(training_s=self._clock.monotonic() - began_at)

    def wait(self, step: int) -> str:
        """Wait for the save of `step`; returns what went wrong, or nothing when it is committed."""
        if self._under_way != step:
            return "it could not be handed to the uploader"
        self._under_way = None
        result = self._uploads.wait(step, FINAL_SAVE_S)
        if result is None:
            return f"no answer from the uploader within {FINAL_SAVE_S:.0f} s"
        if result.state is not SaveState.COMMITTED:
            return result.reason
        self.digest = result.digest
        return ""

    def _hear(self) -> None:
        for result in self._uploads.poll():
            self._take(result)

    def _take(self, result: SaveResult) -> None:
        if result.step == self._under_way:
            self._under_way = None
        if result.state is SaveState.FAILED:
            print(f"checkpoint step={result.step} failed: {result.reason}; training goes on")
        elif self._cost is not None:
            self._cost.uploader_s = result.cpu_s
