"""A snapshot becomes a checkpoint without stopping training.

Once all ranks are known to have had its state, rank 0 offers it to the uploader and goes on. One
save is under way at a time, and a later one that is due waits for its result: a save keeps its slot
from being written, and of three slots only one can be spared. A failed save is reported and never
stops training; a step that was committed with another state before ends the run. It does not retry:
the uploader does.
"""

import os

from elastic.checkpoint.deadline import SAVE_S, save_limit_s
from elastic.config.durations import Every
from elastic.errors import ReplayDiffers, StoreFailed
from elastic.events import CheckpointFailed
from elastic.observe.log import EventLog
from elastic.system.clock import Clock
from elastic.train.loop.schedule import is_save_due
from elastic.train.state.snapshotting import PublishedSnapshot
from elastic.uploader.client import UploaderClient
from elastic.uploader.protocol import SaveResult, SaveState

# How long one call of `wait` may last: ranks that wait for the last save show progress in between.
WAIT_S = 30.0
# Until a generation that resumed from memory has saved once. It makes an interval of ten seconds,
# so that uploads do not compete with a recovery.
GUESSED_COST_S = 0.03


class Checkpointing:
    def __init__(self, uploader: UploaderClient, every: Every, clock: Clock, log: EventLog) -> None:
        self._uploader = uploader
        self._log = log
        self._every = every
        self._clock = clock
        self._processors = os.cpu_count() or 1  # the system reads files to answer
        self._resumed_from: int | None = None  # step of the checkpoint, None if it was none
        self.digest = ""  # of the state that was committed last
        self._last_s = clock.monotonic()
        self._training_s: float | None = None  # that the last save cost; None before the first one
        self._uploader_s = 0.0  # of its processor
        self._under_way: int | None = None
        self._answer_by = 0.0  # the save under way has failed if nothing is heard of it until then
        self._is_overdue = False
        self._refusal = ""  # why the last save could not be handed to the uploader
        self._refused_step: int | None = None

    def resume(self, step: int, source: str) -> None:
        """Training has resumed from the state of `step`; source: as in `ResumePoint`."""
        if source == "checkpoint":
            self._resumed_from = step
        # A run that goes on from memory has time for its first save. A young one saves at its first
        # step, because it has no checkpoint yet.
        if source in ("snapshot", "peer"):
            self._training_s = GUESSED_COST_S

    def is_due(self, step: int) -> bool:
        self._receive_results()
        since_s = self._clock.monotonic() - self._last_s
        # If all processors of a machine are busy, training loses the uploader's seconds on one of
        # them.
        uploader_s = self._uploader_s / self._processors
        cost_s = None if self._training_s is None else self._training_s + uploader_s
        self._is_overdue |= is_save_due(self._every, step=step, since_s=since_s, cost_s=cost_s)
        return self._is_overdue and self._under_way is None

    def save(
        self, published: PublishedSnapshot | None, step: int, *, began_s: float, final: bool = False
    ) -> None:
        """Offer a snapshot to the uploader.

        published: None when there was no memory for a snapshot. began_s: on the monotonic clock,
        when this save began to cost training more than the snapshot did. final: no other save may
        take its place.
        """
        self._receive_results()
        self._last_s, self._is_overdue = began_s, False
        try:
            if published is None:
                raise StoreFailed("there is no memory for a copy of the state")
            self._uploader.offer(
                published.slots, published.snapshot, resumed_from=self._resumed_from, final=final
            )
            self._under_way = step
            # A save may wait for another one of the same size.
            limit_s = 2 * save_limit_s(SAVE_S, published.snapshot.size_bytes) + WAIT_S
            self._answer_by = self._clock.monotonic() + limit_s
        except (OSError, StoreFailed) as error:
            self._refusal = str(error)
            print(f"checkpoint step={step} is not saved: {error}; training goes on")
            # The uploader, which records the other failures, never had it. A last save is tried
            # several times.
            if step != self._refused_step:
                self._refused_step = step
                self._log.record(CheckpointFailed(step=step, reason=self._refusal))
        snapshot_s = 0.0 if published is None else published.cost_s
        self._training_s, self._uploader_s = snapshot_s + self._clock.monotonic() - began_s, 0.0

    def wait(self, step: int) -> str | None:
        """Wait for the save of `step`, the last one that `save` was called for.

        Returns what went wrong, or nothing when it is committed; None after WAIT_S while it goes
        on. Raises ReplayDiffers, as `is_due` and `save`.
        """
        if self._under_way != step:
            return self._refusal  # the uploader never had it
        result = self._uploader.wait(step, WAIT_S)
        if result is None and self._clock.monotonic() < self._answer_by:
            return None
        self._under_way = None
        if result is None:
            return "the uploader has not answered in time"
        _check_same(result)
        if result.state is not SaveState.COMMITTED:
            return result.reason
        self.digest = result.digest
        return ""

    def _receive_results(self) -> None:
        for result in self._uploader.poll():
            if result.step == self._under_way:
                self._under_way = None
            _check_same(result)
            if result.state is SaveState.FAILED:
                print(f"checkpoint step={result.step} failed: {result.reason}; training goes on")
            else:
                self._uploader_s = result.cpu_s


def _check_same(result: SaveResult) -> None:
    """Raises ReplayDiffers for a step that was committed before with another state."""
    if result.state is SaveState.DIFFERS:
        raise ReplayDiffers(result.reason)
