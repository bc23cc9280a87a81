"""A save that dies with its uploader is recorded as failed, once, unless its step is committed.

A client marks a save before it hands it over, with a file beside the uploader's socket, which goes
when the save has ended. What an uploader finds there at its start was lost with those before it;
where none follows, its owner looks. It does not promise to know of the saves of an owner that died
as well.
"""

import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.checkpoint.catalog import commits_of_step
from elastic.errors import StoreFailed
from elastic.events import CheckpointFailed
from elastic.observe.log import EventLog
from elastic.storage.remote import open_store
from elastic.storage.store import Store
from elastic.system.clock import Clock
from elastic.system.files import listing
from elastic.system.untrusted import parse_number
from elastic.uploader.protocol import Offer, UploaderConfig

LOOK_LIMIT_S = 10.0  # for one save; the successor's saves wait
LOST = "the uploader ended before it was committed"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SaveInHand:
    """The save of a snapshot of `step`, which `generation` took."""

    generation: int
    step: int

    @staticmethod
    def of(offer: Offer) -> "SaveInHand":
        return SaveInHand(generation=offer.generation, step=offer.step)

    @staticmethod
    def parse(name: str) -> "SaveInHand | None":
        generation, step = map(parse_number, (name.partition("-")[0], name.partition("-")[2]))
        return None if generation is None or step is None else SaveInHand(generation=generation, step=step)

    def marker(self, socket_path: str) -> Path:
        return _folder(socket_path) / f"{self.generation}-{self.step}"


def mark(socket_path: str, save: SaveInHand) -> bool:
    """Whether it is marked by this call, and was not before.

    Where there is no room for it, the save goes on, and is not recorded if it is lost.
    """
    with suppress(OSError):
        _folder(socket_path).mkdir(exist_ok=True)
        save.marker(socket_path).touch(exist_ok=False)
        return True
    return False


def unmark(socket_path: str, save: SaveInHand) -> None:
    with suppress(OSError):
        save.marker(socket_path).unlink()


class SavesInHand:
    """Of an uploader, which does not listen yet: what is marked was in the hands of dead ones."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._lock = threading.Lock()
        self._own: Counter[SaveInHand] = Counter()
        self._lost = _marked(socket_path)
        self._recording: threading.Thread | None = None

    def add(self, offer: Offer) -> None:
        save = SaveInHand.of(offer)
        with self._lock:
            self._own[save] += 1
            mark(self._socket_path, save)

    def remove(self, offer: Offer) -> None:
        """Its save has ended. A second result of one that hung changes nothing."""
        save = SaveInHand.of(offer)
        with self._lock:
            self._own[save] -= 1
            self._unmark(save)

    def _unmark(self, save: SaveInHand) -> None:
        """Unless another save of the same step is in hand."""
        if self._own[save] <= 0:
            del self._own[save]
            unmark(self._socket_path, save)

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
                self._unmark(save)


def open_log(config: UploaderConfig, clock: Clock) -> EventLog:
    """The uploader's events."""
    return EventLog(Path(config.events_path), node=config.node, clock=clock)


def _folder(socket_path: str) -> Path:
    return Path(f"{socket_path}-saves")


def _marked(socket_path: str) -> list[SaveInHand]:
    """Oldest first; nothing where the folder cannot be read."""
    with suppress(OSError):
        found = (SaveInHand.parse(path.name) for path in listing(_folder(socket_path)))
        return sorted(each for each in found if each is not None)
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
