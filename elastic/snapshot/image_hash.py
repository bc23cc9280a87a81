"""One pass over an image's bytes gives both of its hashes, and threads share that pass.

Both are made of the sha256 of its parts. A part is the head (the length word and the header), or a
tensor: its name, dtype and shape, and its bytes.

- The *digest* is that of the state, in a canonical order: of the sha256 of each tensor, tied ones
  included, and of the other values of each object, sorted by name. Where the tensors lie in the
  image does not count, nor what stands beside the state in its document.
- The *parts' sha256* is that of the image: of the sha256 of the head and of each stored tensor, in
  the order in which they lie, empty ones by name. They leave no gaps, so every byte counts.

A plain sha256 of the bytes would be a second pass, and no two threads could share it. torch is not
needed, so that the uploader can say which state it stores. It does not promise that the bytes are
those that were written.
"""

import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from threading import Event
from typing import Any

from elastic.errors import CheckpointDamaged
from elastic.snapshot import safetensors_header
from elastic.snapshot.safetensors_header import DTYPES, LENGTH, Buffer, Header, TensorEntry

MOST_THREADS = 8  # so many read and hash faster than most disks and memories are

Task = Iterator[None]
# Of one task: large enough to read a disk in order, small enough to share a state evenly.
TASK_BYTES = 32 << 20
PIECE_BYTES = 4 << 20

# The image's bytes from one offset to another, in pieces. It may be called by several threads, and
# raises what says why bytes are missing.
Pieces = Generator[Buffer, None, None]
Source = Callable[[int, int], Pieces]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A stored tensor. names: its own and those that are tied to it; hashes: one for each."""

    entry: TensorEntry
    names: tuple[str, ...]
    hashes: tuple[Any, ...]


class ImageHash:
    """Read the head at once, and the rest by `tasks`; once all of them are done, both hashes are
    there.
    """

    def __init__(self, source: Source, size_bytes: int) -> None:
        """Raises CheckpointDamaged, or what `source` raises."""
        self._source = source
        head = _read_head(source, size_bytes)
        self.header = safetensors_header.parse(head, size_bytes)
        self._head, self._size_bytes = hashlib.sha256(head), size_bytes
        self._data_at = len(head)
        self._parts = _parts_of(self.header)

    def tasks(self) -> list[Task]:
        """Each reads neighbouring tensors. Call once, and run all of them."""
        found, waiting, waiting_bytes = [], [], 0
        for part in self._parts:
            waiting.append(part)
            waiting_bytes += part.entry.end - part.entry.start
            if waiting_bytes >= TASK_BYTES:
                found.append(self._task(waiting))
                waiting, waiting_bytes = [], 0
        return [*found, self._task(waiting)] if waiting else found

    def digest(self) -> str:
        """64 hexadecimal digits. Raises CheckpointDamaged for anything but a state."""
        document = self.header.document
        values = document.get("state") if isinstance(document, dict) else None
        if not isinstance(values, dict):
            raise CheckpointDamaged("the payload is not a training state: its document lacks a state")
        pairs = (pair for part in self._parts for pair in zip(part.names, part.hashes, strict=True))
        found = {name: digest.hexdigest() for name, digest in pairs}
        for name, value in values.items():
            found[f"{name} (values)"] = hashlib.sha256(json.dumps(value).encode()).hexdigest()
        return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()

    def parts_sha256(self) -> str:
        """64 hexadecimal digits. Raises CheckpointDamaged where bytes belong to no part."""
        at, found = self._data_at, hashlib.sha256(self._head.digest())
        for part in self._parts:
            if part.entry.start != at:
                break
            at = part.entry.end
            found.update(part.hashes[0].digest())
        if at != self._size_bytes:
            raise CheckpointDamaged(
                f"the payload is not a training state: what follows byte {at} is no tensor's"
            )
        return found.hexdigest()

    def _task(self, parts: list[_Part]) -> Task:
        at = parts[0].entry.start
        for piece in self._source(at, max(part.entry.end for part in parts)):
            view = memoryview(piece)
            for part in parts:
                # One call for all bytes: hashlib lets other threads run only during a call with a
                # large piece.
                if own := view[max(0, part.entry.start - at) : max(0, part.entry.end - at)]:
                    for digest in part.hashes:
                        digest.update(own)
            at += len(view)
            yield


def in_memory(image: Buffer) -> Source:
    """The source of an image that lies in memory."""
    view = memoryview(image)

    def pieces(start: int, end: int) -> Pieces:
        for at in range(start, end, PIECE_BYTES):
            yield view[at : min(at + PIECE_BYTES, end)]

    return pieces


def run_all(tasks: Iterable[Task], threads: int | None = None) -> None:
    """Run the tasks. Raises the first error; no thread outlives the call.

    threads: None for one for each processor that this process may use, as far as more of them help.
    A task stops between two pieces of its work: there an error elsewhere, or Ctrl-C, ends it. It
    must leave Python's lock, as hashlib, NumPy and system calls do, to be faster.
    """
    is_over = Event()

    def run(task: Task) -> None:
        try:
            while not is_over.is_set() and next(task, is_over) is None:
                pass
        except BaseException:
            is_over.set()
            raise

    with ThreadPoolExecutor(threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        try:
            for done in [pool.submit(run, task) for task in tasks]:
                done.result()
        finally:
            is_over.set()


def _read_head(source: Source, size_bytes: int) -> Buffer:
    """The length word and the header; of a header that cannot be there, some of its bytes.

    A bit that flips in the length word must not have the whole payload kept in memory.
    """
    head = bytearray()
    with closing(source(0, size_bytes)) as pieces:
        for piece in pieces:
            head += piece
            if len(head) < LENGTH.size:
                continue
            length = LENGTH.size + LENGTH.unpack_from(head)[0]
            if not len(head) < length <= size_bytes:
                return head[:length]
    return head


def _parts_of(header: Header) -> tuple[_Part, ...]:
    """In the order in which they lie."""
    names = {name: [name] for name in header.entries}
    for name, first in header.ties.items():
        names[first].append(name)
    found = []
    # Empty ones lie in the same place.
    places = sorted((entry.start, entry.end, name) for name, entry in header.entries.items())
    for _, _, first in places:
        entry = header.entries[first]
        about = f"{DTYPES[entry.dtype][0]} {list(entry.shape)}\n"
        heads = (f"{name} {about}".encode(errors="surrogatepass") for name in names[first])
        hashes = tuple(map(hashlib.sha256, heads))
        found.append(_Part(entry=entry, names=tuple(names[first]), hashes=hashes))
    return tuple(found)
