"""Each version of the group is one object that is created exclusively and never changed or deleted, so the newest is the one without a successor.

state/<version>    the versions from 1 on, without gaps; a run makes a few for each generation, of a kilobyte or two
beats/<node>       the counter of one node, written over
exclusive          shows that this storage refuses to create an object twice

Versions are looked for by name and never in a listing, which may be old: a version once seen is never unseen, and a node that slept for hours goes through all that
it missed. Listings only tell the names of nodes, and `track_nodes` tells of those that matter. What fences savers is the newest version itself, read when they ask (uploader/fence.py).

Requests cost time and money, so answers are used for a while: `PollIntervals` says for how long. It does not promise to work where the service ignores the condition of a creation:
that is found out at the first call and refused.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote, unquote

from elastic.rendezvous.backends.backend import BackendFailed, BackendRefused
from elastic.storage.objects import Objects, ObjectsFailed, ObjectsRefused
from elastic.system.clock import Clock, SystemClock

_STATE = "state/"
_BEATS = "beats/"
_PROOF = "exclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class PollIntervals:
    """Seconds from one request to the next: for the group's state, while it has changed within `active_for_s` and else; for beats; and after a failure.

    `names_s`: after which the nodes' names are listed again, beside each time that the group's state changed.
    `quiet_s`: a counter that has not moved for so long is read again only when a listing says that it was written.
    """

    active_s: float = 0.2
    active_for_s: float = 10.0
    idle_s: float = 1.0
    beats_s: float = 2.0
    names_s: float = 30.0
    quiet_s: float = 120.0
    failed_s: float = 1.0


NO_DELAY = PollIntervals(active_s=0.0, idle_s=0.0, beats_s=0.0, names_s=0.0, failed_s=0.0)


def newest_version(exists: Callable[[int], bool], known: int) -> int:
    """The highest version, of versions without gaps, where `known` exists or is 0; asks once where nothing came after it, else about log2 of what came."""
    low, stride = known, 1
    while exists(low + stride):
        low, stride = low + stride, stride * 2
    high = low + stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    return low


@dataclass(slots=True, kw_only=True)
class _Counter:
    value: int
    mark: str
    moved_s: float


class ObjectStoreBackend:
    def __init__(
        self, url: str, *, intervals: PollIntervals | None = None, clock: Clock | None = None
    ) -> None:
        """`url`: a folder of its own. Nothing is asked yet."""
        self._objects = Objects(url)
        self._intervals = PollIntervals() if intervals is None else intervals
        self._clock = SystemClock() if clock is None else clock
        # Not one for all: a request for the state that hangs must not hold up this node's beats.
        self._state_lock, self._beats_lock, self._mine_lock = (
            threading.RLock(),
            threading.Lock(),
            threading.Lock(),
        )
        self._mine: dict[str, int] = {}
        self._newest: tuple[int, bytes] | None = None
        self._taken = 0  # the highest version that is known to exist, seen or not
        self._changed_s = float("-inf")
        self._next_read_s = float("-inf")  # when to ask again
        self._trouble = ""
        self._is_exclusive = False
        self._counters: dict[str, _Counter] = {}
        self._tracked: frozenset[str] = frozenset()
        self._beats_s = float("-inf")
        self._named: tuple[float, int] = float("-inf"), -1  # when the names were listed, and at which version

    def read(self) -> tuple[int, bytes] | None:
        with self._state_lock:
            if self._clock.monotonic() >= self._next_read_s:
                self._refresh()
            elif self._trouble:
                raise BackendFailed(self._trouble)
            return self._newest

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        with self._state_lock:
            if (version or 0) != self._seen:
                self._refresh()
            if (version or 0) != self._seen:
                return False
            successor = self._seen + 1
            try:
                is_ours = self._objects.create(_state(successor), value)
            except ObjectsRefused as error:
                raise BackendRefused(str(error)) from error
            except ObjectsFailed:
                # It may be there all the same, now or later; whoever reads finds out.
                self._next_read_s = float("-inf")
                return False
            self._taken = successor
            if is_ours:
                self._adopt(successor, value)
            else:
                self._next_read_s = float("-inf")
            return is_ours

    def beat(self, node_id: str) -> None:
        with self._mine_lock:
            self._mine[node_id] = self._mine.get(node_id, 0) + 1
            with _failures("a heartbeat"):
                self._objects.write(_beat(node_id), str(self._mine[node_id]).encode())

    def beats(self) -> dict[str, int]:
        with self._beats_lock:
            now_s = self._clock.monotonic()
            if now_s >= self._beats_s:
                self._beats_s = now_s + self._intervals.failed_s
                with _failures("heartbeats"):
                    self._count(now_s)
                self._beats_s = now_s + self._intervals.beats_s
            # Counters begin at 1.
            return {node_id: one.value for node_id, one in self._counters.items() if one.value}

    def track_nodes(self, node_ids: Collection[str]) -> None:
        self._tracked = frozenset(node_ids)

    @property
    def _seen(self) -> int:
        return 0 if self._newest is None else self._newest[0]

    def _refresh(self) -> None:
        self._next_read_s = self._clock.monotonic() + self._intervals.failed_s
        self._trouble = ""
        try:
            with _failures("the group's state"):
                self._check_exclusive()
                self._catch_up()
        except BackendFailed as error:
            self._trouble = str(error)
            raise
        now_s = self._clock.monotonic()
        is_active = now_s - self._changed_s < self._intervals.active_for_s
        self._next_read_s = now_s + (self._intervals.active_s if is_active else self._intervals.idle_s)

    def _catch_up(self) -> None:
        values: dict[int, bytes] = {}

        def exists(version: int) -> bool:
            value = self._objects.read(_state(version))
            if value is not None:
                values[version] = value
            return value is not None

        newest = newest_version(exists, self._seen)
        if newest < self._taken:
            raise BackendFailed(
                f"version {self._taken} of the group in {self._objects.url} exists and cannot be found; trying again at the next poll"
            )
        if newest > self._seen:
            self._adopt(newest, values[newest])

    def _adopt(self, version: int, value: bytes) -> None:
        self._newest = version, value
        self._taken = max(self._taken, version)
        self._changed_s = self._clock.monotonic()

    def _check_exclusive(self) -> None:
        """Raises BackendRefused where nodes could overwrite what others wrote."""
        if self._is_exclusive:
            return
        if self._objects.create(_PROOF, b"created once") and self._objects.create(_PROOF, b"created twice"):
            raise BackendRefused(
                f"{self._objects.url} should refuse to create an object that exists, but it was created twice: nodes cannot meet in this storage;"
                " give --rdzv-backend etcd or c10d, or --rdzv-endpoint FOLDER, a folder that all nodes share"
            )
        self._is_exclusive = True

    def _count(self, now_s: float) -> None:
        if now_s - self._named[0] >= self._intervals.names_s or self._named[1] != self._seen:
            self._named = now_s, self._seen
            for name, listed in self._objects.listed(_BEATS).items():
                self._add_node(unquote(name.removeprefix(_BEATS)), listed.mark, now_s)
        tracked = self._tracked
        for node_id in tracked - self._counters.keys():
            self._add_node(node_id, "", now_s)
        wanted = [
            node_id
            for node_id, one in self._counters.items()
            if now_s - one.moved_s < self._intervals.quiet_s or node_id in tracked
        ]
        found = self._objects.read_all(_beat(node_id) for node_id in wanted)
        for node_id in wanted:
            text = found.get(_beat(node_id), b"")
            if text.isdigit() and int(text) != self._counters[node_id].value:
                self._counters[node_id].value = int(text)
                self._counters[node_id].moved_s = now_s

    def _add_node(self, node_id: str, mark: str, now_s: float) -> None:
        known = self._counters.get(node_id)
        if known is None:
            self._counters[node_id] = _Counter(value=0, mark=mark, moved_s=now_s)
        elif known.mark != mark:
            known.mark, known.moved_s = mark, now_s


@contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        yield
    except ObjectsRefused as error:
        raise BackendRefused(f"{what}: {error}") from error
    except ObjectsFailed as error:
        raise BackendFailed(f"{what}: {error}; trying again") from error


def _state(version: int) -> str:
    return f"{_STATE}{version:012d}.json"


def _beat(node_id: str) -> str:
    return _BEATS + quote(node_id, safe="")
