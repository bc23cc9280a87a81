"""A small object appears in a store whole or not at all, and every failure is classified.

It does not promise that a payload appears whole: a crash may leave a part of one, which is why a
checkpoint exists only once its commit record does. A store raises StoreFailed for everything that
goes wrong. The subclasses below tell callers more: StoreUnavailable may be tried again,
StoreRefused is for a person to change, and ObjectNotFound and OutsideStore are answers.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import IO, Protocol, TypeVar

import tenacity

from elastic.errors import StoreFailed
from elastic.system.clock import Clock

CHUNK_BYTES = 4 * 1024 * 1024
SMALL_LIMIT_BYTES = 1 << 20
READ_LIMIT_S = 120.0
_FINAL_ERRNOS = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR}

Answer = TypeVar("Answer")


class StoreUnavailable(StoreFailed):
    """The call failed in a way that may pass, or its answer was lost, so that it may have taken
    effect.
    """


class StoreRefused(StoreFailed):
    """The storage says no: to the credentials, or because there is no such bucket."""


class ObjectNotFound(StoreFailed):
    """Nothing is stored under this name."""


class OutsideStore(StoreFailed):
    """The name leads to something that is not an object of this store: a link, or no plain file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """`name` is relative to the store's URL."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """`size_bytes` (1 or more) bytes of an open file, from `offset` on.

    Reading them does not move the descriptor's own offset, which other processes share.
    """

    fd: int
    size_bytes: int
    offset: int = 0

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Raise StoreFailed when the file is shorter than `size_bytes`."""
        position = 0
        while position < self.size_bytes:
            chunk = os.pread(self.fd, min(chunk_bytes, self.size_bytes - position), self.offset + position)
            if not chunk:
                raise StoreFailed(
                    f"the image ends after {position} bytes, expected {self.size_bytes}: it was cut while it was saved"
                )
            position += len(chunk)
            yield chunk


class Store(Protocol):
    """Names are relative, with `/` between folders.

    Every verb may raise StoreUnavailable, or StoreFailed for good.
    """

    def list(self) -> list[StoredObject]:
        """Every object, sorted by name; an empty list when the store's folder does not exist."""

    def read(self, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Its bytes from `start` to `end`, or to its own end, in chunks; threads may share a store.

        Raises ObjectNotFound or OutsideStore.
        """

    def write(self, name: str, payload: Payload, midway: Callable[[], None]) -> int:
        """Store a payload under a name that no other writer uses; the size in bytes that the store
        now reports.

        Calls `midway` once after it has begun and before the object is complete, half-way where it
        can.
        """

    def create(self, name: str, data: bytes) -> bool:
        """Store a small object whole unless the name is taken; False when it is.

        Durable when it returns True.
        """

    def delete(self, name: str) -> None:
        """Deleting an object that does not exist is no error."""


def read_range(file: IO[bytes], start: int, end: int | None, chunk_bytes: int) -> Iterator[bytes]:
    """A file's bytes from `start` to `end`, or to its own end where that comes first."""
    file.seek(start)
    while end is None or start < end:
        if not (chunk := file.read(chunk_bytes if end is None else min(chunk_bytes, end - start))):
            return
        yield chunk
        start += chunk_bytes


def retrying(call: Callable[[], Answer], *, clock: Clock, deadline: float, attempts: int = 1000) -> Answer:
    """The answer of `call`, which is tried again after StoreUnavailable.

    It ends at `deadline` on the monotonic clock, or after `attempts`, with the last error.
    """

    def is_over(state: tenacity.RetryCallState) -> bool:
        return state.attempt_number >= attempts or clock.monotonic() + state.upcoming_sleep >= deadline

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(StoreUnavailable),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=20.0),
        stop=is_over,
        sleep=clock.sleep,
        reraise=True,
    )(call)


def reading(call: Callable[[], Answer], clock: Clock, until_s: float = inf) -> Answer:
    """`retrying` for two minutes and five attempts, or until `until_s` on the monotonic clock."""
    deadline = min(clock.monotonic() + READ_LIMIT_S, until_s)
    return retrying(call, clock=clock, deadline=deadline, attempts=5)


def read_small(store: Store, name: str, clock: Clock, until_s: float = inf) -> bytes | None:
    """A small object, None when there is none.

    Of one above SMALL_LIMIT_BYTES no further chunk is read; its length shows that it is too large.
    """

    def whole() -> bytes:
        data = bytearray()
        for chunk in store.read(name):
            data += chunk
            if len(data) > SMALL_LIMIT_BYTES:
                break
        return bytes(data)

    with suppress(ObjectNotFound):
        return reading(whole, clock, until_s)
    return None


def create_or_read(store: Store, name: str, data: bytes, clock: Clock) -> bytes:
    """What the store then holds under `name`: `data`, or what another process created before.

    Where it is there already nothing is written, so that a full disk is no failure.
    """

    def once() -> bytes:
        found = read_small(store, name, clock)
        if found is None:
            store.create(name, data)
            found = read_small(store, name, clock)
        if found is None:
            raise StoreUnavailable(f"{name} was created and cannot be found; is its store losing writes?")
        return found

    return reading(once, clock)


def as_store_failure(doing: str, error: Exception) -> StoreFailed:
    """An exception of a storage library or of the kernel as a sentence, classified."""
    sentence = f"{doing} failed: {type(error).__name__}: {error}"
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, FileNotFoundError):
        return ObjectNotFound(f"{doing} failed: nothing is there ({error})")
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StoreFailed(
            f"{sentence}. The disk or quota is full: free space, keep fewer checkpoints, or use another --run-dir"
        )
    if isinstance(error, PermissionError) or number in _FINAL_ERRNOS:
        return StoreRefused(
            f"{sentence}. Expected a folder or bucket that may be written: check the path, permissions and credentials"
        )
    # By name: the classes of botocore and of Google's library cannot be imported without the
    # extras.
    if "Credentials" in type(error).__name__:
        return StoreRefused(
            f"{sentence}. Expected credentials for this store in the environment or its config file"
        )
    return StoreUnavailable(sentence)
