"""Each version of the group is an object that is created exclusively and never changed or deleted.

state/<version>    the versions from 1 on, without gaps; a few for each generation, 1 or 2 kB each
beats/<node>       the text of one node, overwritten
exclusive          shows that this storage refuses to create an object twice

The newest version is the one without a successor. It is looked for by name, because a listing may
be old; only a process that knows none begins with what is listed. So a version once seen is never
unseen, and a node that slept for hours finds all that it missed. Texts are read by the names of
nodes, too: only a caller that asks for those of all nodes needs a listing. A node that a listing
lacks is found by the next. Savers are fenced by the newest version itself, read when they ask
(uploader/fence.py).

Requests cost time and money, so answers are used for a while.

It does not promise to work in a service that ignores the condition of a creation: the first call
finds that out, and refuses.
"""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from urllib.parse import quote, unquote

from elastic.errors import StoreFailed
from elastic.rendezvous.backends.backend import BackendFailed, BackendRefused
from elastic.storage.remote import Objects
from elastic.storage.store import StoreRefused
from elastic.system.clock import Clock, SystemClock
from elastic.system.untrusted import parse_number

_STATE = "state/"
_BEATS = "beats/"
_PROOF = "exclusive"
STATE_S, BEATS_S = 0.5, 2.0


class ObjectStoreBackend:
    def __init__(
        self, url: str, *, state_s: float = STATE_S, beats_s: float = BEATS_S, clock: Clock | None = None
    ) -> None:
        """`url`: a folder for this group only. Makes no request yet.

        state_s, beats_s: between two requests for the group's state, and for texts of named nodes.
        """
        self._objects = Objects(url)
        self._state_s, self._beats_s = state_s, beats_s
        self._clock = SystemClock() if clock is None else clock
        # Two locks: while a request for the state hangs, this node's heartbeats must go on.
        self._state_lock, self._shown_lock = threading.RLock(), threading.Lock()
        self._version, self._value = 0, b""
        self._highest = 0  # known to exist, whether its value was read or not
        self._next_read_s = float("-inf")
        self._problem = ""
        self._is_exclusive = False
        self._shown: dict[str, str] = {}  # of all nodes asked for, empty: none was found
        self._next_beats_s = float("-inf")

    def read(self) -> tuple[int, bytes] | None:
        with self._state_lock:
            if self._clock.monotonic() >= self._next_read_s:
                self._refresh()
            elif self._problem:
                raise BackendFailed(self._problem)
            return (self._version, self._value) if self._version else None

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        with self._state_lock:
            if (version or 0) != self._version:
                self._refresh()
            if (version or 0) != self._version:
                return False
            successor = self._version + 1
            self._next_read_s = float("-inf")  # the next read finds out what came of this
            try:
                is_created = self._objects.create(_state(successor), value)
            except StoreRefused as error:
                raise BackendRefused(str(error)) from error
            except StoreFailed:
                return False  # it may have been created all the same, or may be yet
            self._highest = successor
            if is_created:
                self._adopt(successor, value)
            return is_created

    def show(self, node_id: str, text: str) -> None:
        with _failures("a heartbeat"):
            self._objects.write(_beat(node_id), text.encode())

    def shown(self, node_ids: Collection[str] | None = None) -> dict[str, str]:
        with self._shown_lock, _failures("heartbeats"):
            now_s = self._clock.monotonic()
            if node_ids is None:
                listed = (unquote(name.removeprefix(_BEATS)) for name in self._objects.listed(_BEATS))
                wanted = self._shown.keys() | set(listed)
            else:
                wanted = set(node_ids)
            if node_ids is None or now_s >= self._next_beats_s or not wanted <= self._shown.keys():
                found = self._objects.read_all(_beat(node_id) for node_id in wanted)
                self._next_beats_s = now_s + self._beats_s
                for node_id in wanted:
                    self._shown[node_id] = found.get(_beat(node_id), b"").decode(errors="replace")
            return {node_id: self._shown[node_id] for node_id in wanted if self._shown[node_id]}

    def _refresh(self) -> None:
        self._next_read_s = self._clock.monotonic() + self._state_s
        self._problem = ""
        try:
            with _failures("the group's state"):
                self._check_exclusive()
                self._catch_up()
        except BackendFailed as error:
            self._problem = str(error)
            raise

    def _catch_up(self) -> None:
        newest, value = self._version, self._value
        if not newest:
            names = self._objects.listed(_STATE)
            listed = (parse_number(name[len(_STATE) : -len(".json")]) for name in names)
            self._highest = max([self._highest, *filter(None, listed)])
            newest = max(0, self._highest - 1)
        while (found := self._objects.read(_state(newest + 1))) is not None:
            newest, value = newest + 1, found
        if newest < self._highest:
            raise BackendFailed(
                f"version {self._highest} of the group in {self._objects.url} exists and cannot be found; trying again at the next poll"
            )
        if newest > self._version:
            self._adopt(newest, value)

    def _adopt(self, version: int, value: bytes) -> None:
        self._version, self._value = version, value
        self._highest = max(self._highest, version)

    def _check_exclusive(self) -> None:
        """Raises BackendRefused if nodes could overwrite each other's versions."""
        if self._is_exclusive:
            return
        if self._objects.create(_PROOF, b"created once") and self._objects.create(_PROOF, b"created twice"):
            raise BackendRefused(
                f"{self._objects.url} should refuse to create an object that exists, but it was created twice: nodes cannot meet in this storage;"
                " give --rdzv-backend etcd or c10d, or --rdzv-endpoint FOLDER, a folder that all nodes share"
            )
        self._is_exclusive = True


@contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        yield
    except StoreRefused as error:
        raise BackendRefused(f"{what}: {error}") from error
    except StoreFailed as error:
        raise BackendFailed(f"{what}: {error}; trying again") from error


def _state(version: int) -> str:
    return f"{_STATE}{version:012d}.json"


def _beat(node_id: str) -> str:
    return _BEATS + quote(node_id, safe="")
