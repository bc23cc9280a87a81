"""Small payloads of checkpoints, and the hashes that a writer gives for them."""

import json
from contextlib import closing
from typing import Any

from elastic.checkpoint.payload_check import read_state
from elastic.checkpoint.record import CommitRecord, Hashes
from elastic.snapshot import checksum
from elastic.snapshot.image_hash import ImageHash, in_memory
from elastic.snapshot.safetensors_header import DOCUMENT, LENGTH, METADATA, TIES
from elastic.storage.store import Store
from elastic.system.clock import Clock
from elastic.system.parallel import run_all


def payload_of(data: bytes, **beside: Any) -> bytes:
    """An image with one tensor of these bytes; beside: what does not count in its digest."""
    document = json.dumps({"state": {}} | beside)
    tensor = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    head = json.dumps({METADATA: {DOCUMENT: document, TIES: "{}"}, "data": tensor}).encode()
    return LENGTH.pack(len(head)) + head + data


def hashes_of(payload: bytes | bytearray | memoryview) -> Hashes:
    found = ImageHash(in_memory(payload), memoryview(payload).nbytes)
    run_all(found.tasks(), 1)
    return Hashes(
        digest=found.digest(),
        sha256=found.parts_sha256(),
        checksum=checksum.of_image(memoryview(payload)),
    )


def bytes_of(store: Store, record: CommitRecord, clock: Clock) -> bytes:
    """As a restore reads them. Raises CheckpointDamaged, StoreFailed."""
    with closing(read_state(store, record, clock)) as memory:
        return bytes(memory.view())
