"""Rank 0 hands a finished copy of the state to the uploader and trains on; what became of the save comes back later.

The copy is made once, into memory that belongs to the uploader as soon as it has been handed over: it survives this process. A save that
fails is reported and never stops training. It does not retry: that is the uploader's business.
"""

import os
from dataclasses import dataclass

from elastic.checkpoint import image
from elastic.checkpoint.handoff import Uploads
from elastic.clock import Clock
from elastic.errors import StoreFailed
from elastic.options import SaveEvery
from elastic.train.save_policy import is_due
from elastic.train.state import Parts

FINAL_SAVE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A place in the run whose state is saved; `digest` is that of the state, `chain` of all steps up to it."""

    step: int
    epoch: int
    digest: str
    chain: str


class Saving:
    def __init__(self, uploads: Uploads, every: SaveEvery, clock: Clock, facts: dict[str, object]) -> None:
        """facts: what a commit record says beside the point: generation, world_size, torch."""
        self._uploads = uploads
        self._every = every
        self._clock = clock
        self._facts = facts
        self.resumed_from: int | None = None  # step of the checkpoint that this generation went on from
        self._last_at = clock.monotonic()
        self._cost_s: float | None = None

    def is_due(self, step: int) -> bool:
        since_s = self._clock.monotonic() - self._last_at
        return is_due(self._every, step=step, since_s=since_s, cost_s=self._cost_s)

    def save(self, parts: Parts, point: Point, *, began_at: float, final: bool = False) -> None:
        """Copy the state and hand it over. `began_at`, on the monotonic clock: when this save began to cost training time."""
        self._last_at = began_at
        # Before the offer: the answer to this save belongs to `wait`, and may come at once.
        self._report()
        document = {"state": parts.document, "step": point.step, "epoch": point.epoch, "chain": point.chain}
        try:
            fd, size_bytes = _copy(parts, document)
            try:
                about = {
                    "step": point.step,
                    "epoch": point.epoch,
                    "digest": point.digest,
                    "size_bytes": size_bytes,
                }
                self._uploads.offer(
                    fd, about | self._facts | {"resumed_from": self.resumed_from}, final=final
                )
            finally:
                os.close(fd)
        except (OSError, StoreFailed) as error:
            print(f"checkpoint step={point.step} is not saved: {error}; training goes on")
        self._cost_s = self._clock.monotonic() - began_at

    def wait(self, step: int) -> str:
        """Wait for the save of `step`; returns what went wrong, or nothing when it is committed."""
        try:
            answer = self._uploads.wait(step, FINAL_SAVE_S)
        except StoreFailed as error:
            return str(error)
        if answer is None:
            return f"no answer from the uploader within {FINAL_SAVE_S:.0f} s"
        return "" if answer["state"] == "committed" else str(answer["reason"])

    def _report(self) -> None:
        for answer in self._uploads.poll():
            if answer["state"] == "failed":
                print(f"checkpoint step={answer['step']} failed: {answer['reason']}; training goes on")


def _copy(parts: Parts, document: object) -> tuple[int, int]:
    fd = os.memfd_create("elastic-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def sink(piece: memoryview) -> None:
        while piece:
            piece = piece[os.write(fd, piece) :]

    try:
        return fd, image.write(parts.tensors, document, sink)
    except BaseException:
        os.close(fd)
        raise
