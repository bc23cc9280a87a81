"""A snapshot becomes an offer to the uploader: where its bytes are, and what its commit record will say of them."""

from elastic.snapshot.slots import Snapshot, SnapshotSlots
from elastic.uploader.client import UploaderClient


def offer(
    uploads: UploaderClient, area: SnapshotSlots, snapshot: Snapshot, *, resumed_from: int | None, final: bool
) -> None:
    """resumed_from: step of a checkpoint that must not be deleted yet. Raises StoreFailed when no uploader takes it."""
    about = {key: snapshot.about[key] for key in ("step", "epoch", "generation", "world_size", "torch")}
    where = {
        "slot": snapshot.slot,
        "seq": snapshot.seq,
        "offset": snapshot.offset,
        "size_bytes": snapshot.size_bytes,
    }
    uploads.offer(area.fd, about | where | {"resumed_from": resumed_from}, final=final)
