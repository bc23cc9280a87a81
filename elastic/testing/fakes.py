"""Stand-ins for tests of whatever saves or loads checkpoints: a store in memory that fails as told, and a clock that is moved by hand.

They keep the promises of `store.Store` until they are told to break one.
"""

from collections.abc import Callable, Iterator

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
    """`before` and `after` are called with a verb and a name around its effect and may raise; `is_exclusive` False ignores create-only."""

    def __init__(self, objects: dict[str, bytes] | None = None, *, is_exclusive: bool = True) -> None:
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self.is_exclusive = is_exclusive
        self.before: Callable[[str, str], None] = _nothing
        self.after: Callable[[str, str], None] = _nothing

    def list(self) -> list[StoredObject]:
        self.before("list", "")
        entries = [
            StoredObject(name=name, size_bytes=len(data)) for name, data in sorted(self.objects.items())
        ]
        self.after("list", "")
        return entries

    def read(self, name: str) -> Iterator[bytes]:
        self.before("read", name)
        if name not in self.objects:
            raise ObjectNotFound(name)
        yield self.objects[name]
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
        is_new = name not in self.objects or not self.is_exclusive
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
