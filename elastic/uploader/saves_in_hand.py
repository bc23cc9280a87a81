"""A save that dies with its uploader is recorded as failed, once, unless its step is committed.

An uploader writes down what it has in hand, beside its socket. Its successor reads that, or its
owner where none follows. It does not promise to know of an offer that the dead one had not read
yet, nor of the saves of an owner that died as well.
"""

import json
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic.checkpoint.catalog import commits_of_step
from elastic.errors import StoreFailed
from elastic.events import CheckpointFailed
from elastic.observe.log import EventLog
from elastic.storage.remote import open_store
from elastic.storage.store import Store
from elastic.system.backlog import Backlog
from elastic.system.clock import Clock
from elastic.system.files import read_if_there, replace_whole
from elastic.system.untrusted import Count, decode
from elastic.uploader.protocol import Offer, UploaderConfig

LOOK_LIMIT_S = 10.0  # for one save; the successor's saves wait
LOST = "the uploader ended before it was committed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveInHand:
    """The save of a snapshot of `step`, which `generation` took."""

    step: Count
    generation: Count

    @staticmethod
    def of(offer: Offer) -> "SaveInHand":
        return SaveInHand(step=offer.step, generation=offer.generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saves:
    in_hand: list[SaveInHand]


class SavesInHand:
    """Of the one uploader of an owner that lives, and of the dead ones before it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._saves = _read(path)
        self._lost = list(dict.fromkeys(self._saves))
        self._recording: threading.Thread | None = None

    def add(self, offer: Offer) -> None:
        with self._lock:
            self._saves.append(SaveInHand.of(offer))
            self._write()

    def remove(self, offer: Offer) -> None:
        """Its save has ended. One that is not there was reported before."""
        with self._lock, suppress(ValueError):
            self._saves.remove(SaveInHand.of(offer))
            self._write()

    def begin_recording(self, config: UploaderConfig, clock: Clock) -> None:
        """Record those that a dead uploader had in hand, in a thread: the storage may hang."""
        if self._lost:
            self._recording = threading.Thread(
                target=self._record_lost, args=(config, clock), daemon=True, name="lost-saves"
            )
            self._recording.start()

    def wait_recorded(self, timeout_s: float | None = None) -> None:
        """To be called before a save: it may be of the same step, or delete what was committed."""
        if self._recording is not None:
            self._recording.join(timeout_s)

    def _record_lost(self, config: UploaderConfig, clock: Clock) -> None:
        store, log = open_store(config.checkpoints_url), open_log(config, clock)
        for save in self._lost:
            if reason := _why_failed(save, store, config.run_id, clock):
                log.generation = save.generation
                log.record(CheckpointFailed(step=save.step, reason=reason))
            with self._lock:
                self._saves = [each for each in self._saves if each != save]
                self._write()

    def _write(self) -> None:
        # Where there is no room, saving goes on, and a save that is lost then is not recorded.
        with suppress(OSError):
            text = json.dumps(asdict(_Saves(in_hand=self._saves)))
            replace_whole(self._path, text.encode(), fsync=False)


def open_log(config: UploaderConfig, clock: Clock) -> EventLog:
    """The uploader's events."""
    backlog = None if config.backlog is None else Backlog.open(config.backlog)
    return EventLog(Path(config.events_path), node=config.node, clock=clock, backlog=backlog)


def _read(path: Path) -> list[SaveInHand]:
    """Nothing where none was written, or what was written cannot be read."""
    with suppress(OSError, ValueError):
        return decode(_Saves, read_if_there(path), what="the saves in hand").in_hand
    return []


def _why_failed(save: SaveInHand, store: Store, run_id: str, clock: Clock) -> str:
    """Empty where its step is committed; a commit of an older generation was there before."""
    try:
        records, _ = commits_of_step(store, save.step, clock, clock.monotonic() + LOOK_LIMIT_S)
    except StoreFailed as error:
        return f"{LOST}, or right after: the storage does not tell which ({error})"
    if any(each.run_id == run_id and each.generation >= save.generation for each in records):
        return ""
    return LOST
