"""Fakes for tests of this library and of programs that use it.

FakeClock is moved by hand. FakeStore keeps the promises of `storage.store.Store` in memory until a
test tells it to break one. MemoryBackend keeps those of `rendezvous.backends.backend.Backend`
within one process.
"""

import threading
from collections.abc import Callable, Collection, Iterator

from elastic.storage.store import ObjectNotFound, Payload, StoredObject


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeStore:
    """`before` and `after` are called with a verb and a name around its effect and may raise."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self.before: Callable[[str, str], None] = _nothing
        self.after: Callable[[str, str], None] = _nothing

    def list(self) -> list[StoredObject]:
        self.before("list", "")
        objects = sorted(self.objects.items())
        entries = [StoredObject(name=name, size_bytes=len(data)) for name, data in objects]
        self.after("list", "")
        return entries

    def read(self, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        self.before("read", name)
        if name not in self.objects:
            raise ObjectNotFound(name)
        yield self.objects[name][start:end]
        self.after("read", name)

    def write(self, name: str, payload: Payload, midway: Callable[[], None]) -> int:
        self.before("write", name)
        data = b"".join(payload.chunks())
        # Whatever interrupts a write here finds half of it stored, as on a disk.
        self.objects[name] = data[: len(data) // 2]
        midway()
        self.before("write-half", name)
        self.objects[name] = data
        self.after("write", name)
        return len(data)

    def create(self, name: str, data: bytes) -> bool:
        self.before("create", name)
        is_new = name not in self.objects
        if is_new:
            self.objects[name] = data
        self.after("create", name)
        return is_new

    def delete(self, name: str) -> None:
        self.before("delete", name)
        self.objects.pop(name, None)
        self.after("delete", name)


def _nothing(_verb: str, _name: str) -> None:
    pass


class MemoryBackend:
    """The contract of a rendezvous backend within one process, and the shortest way to read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: list[bytes] = []
        self._shown: dict[str, str] = {}

    def read(self) -> tuple[int, bytes] | None:
        with self._lock:
            return (len(self._values), self._values[-1]) if self._values else None

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        with self._lock:
            if (version or 0) != len(self._values):
                return False
            self._values.append(value)
            return True

    def show(self, node_id: str, text: str) -> None:
        with self._lock:
            self._shown[node_id] = text

    def shown(self, node_ids: Collection[str] | None = None) -> dict[str, str]:
        with self._lock:
            wanted = self._shown.keys() if node_ids is None else self._shown.keys() & node_ids
            return {node_id: self._shown[node_id] for node_id in wanted}

    def history(self) -> list[bytes]:
        """Every value that was ever set, oldest first."""
        with self._lock:
            return list(self._values)
