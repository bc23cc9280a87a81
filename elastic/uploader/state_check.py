"""A committed payload passes only if a restore would accept it: its bytes match the commit record,
and they are the state whose digest the record has.

It does not say whether that state fits a recipe's objects; only the recipe can tell.
"""

from elastic.checkpoint.catalog import payload_chunks
from elastic.checkpoint.record import CommitRecord
from elastic.snapshot.safetensors_header import StateDigest, check_digest
from elastic.storage.store import Store, reading
from elastic.system.clock import Clock


def check_state(store: Store, record: CommitRecord, clock: Clock) -> None:
    """Read a payload piece by piece, and keep none: it may be larger than this machine's memory.

    Raises CheckpointDamaged for what a restore would not accept; StoreFailed.
    """

    def digest() -> str:
        found = StateDigest(record.size_bytes)
        for chunk in payload_chunks(store, record):
            found.add(chunk)
        return found.hexdigest()

    check_digest(reading(digest, clock), record.digest)
