"""Small payloads of checkpoints, the hashes that a writer gives for them, and their commits."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from elastic.checkpoint.commit import Committed, WriteLimits, commit
from elastic.checkpoint.payload_check import read_state
from elastic.checkpoint.record import COMMIT, CommitRecord, Hashes, Save, step_dir
from elastic.snapshot import checksum
from elastic.snapshot.image_hash import ImageHash, in_memory, run_all
from elastic.snapshot.safetensors_header import DOCUMENT, LENGTH, METADATA, STRIDES, TIES
from elastic.storage.store import Payload, Store
from elastic.system.clock import Clock, SystemClock


def payload_of(data: bytes, **beside: Any) -> bytes:
    """An image with one tensor of these bytes; beside: what does not count in its digest."""
    document = json.dumps({"state": {}} | beside)
    tensor = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    head = json.dumps({METADATA: {DOCUMENT: document, TIES: "{}", STRIDES: "{}"}, "data": tensor}).encode()
    return LENGTH.pack(len(head)) + head + data


def hashes_of(payload: bytes | bytearray | memoryview) -> Hashes:
    found = ImageHash(in_memory(payload), memoryview(payload).nbytes)
    run_all(found.tasks(), 1)
    sums = checksum.of_image(memoryview(payload))
    return Hashes(digest=found.digest(), sha256=found.parts_sha256(), checksum=sums)


def bytes_of(store: Store, record: CommitRecord, clock: Clock) -> bytes:
    """As a restore reads them. Raises CheckpointDamaged, StoreFailed."""
    with closing(read_state(store, record.payloads[0], clock)) as memory:
        return bytes(memory.view())


def record_name(store: Store, step: int) -> str:
    """Of the only commit record of this step."""
    names = (each.name for each in store.list() if each.name.endswith(f"/{COMMIT}"))
    (found,) = (name for name in names if name.startswith(step_dir(step)))
    return found


@contextmanager
def in_memory_file(data: bytes | bytearray) -> Iterator[Payload]:
    fd = os.memfd_create("image")
    try:
        os.write(fd, data)
        yield Payload(fd=fd, size_bytes=len(data))
    finally:
        os.close(fd)


def commit_payload(
    store: Store,
    data: bytes | bytearray,
    step: int,
    *,
    generation: int = 1,
    run_id: str = "r",
    clock: Clock | None = None,
    deadline_s: float = 100.0,
    is_fenced: Callable[[], bool] = lambda: False,
    reached: Callable[[str], None] = lambda _point: None,
) -> Committed:
    """As a writer does. Raises as `commit`."""
    clock = clock or SystemClock()
    save = Save(run_id=run_id, step=step, generation=generation)
    limits = WriteLimits(deadline=clock.monotonic() + deadline_s, is_fenced=is_fenced)
    with in_memory_file(data) as payload:
        hashed = partial(hashes_of, data)
        return commit(store, payload, save, limits=limits, clock=clock, reached=reached, hashed=hashed)
