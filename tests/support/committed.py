"""A run directory with committed states, written as a run writes them."""

from pathlib import Path

from payloads import commit_payload

from elastic.checkpoint.record import CommitRecord
from elastic.config import identity
from elastic.config.identity import Identity
from elastic.data.record import DataRecord
from elastic.snapshot import image
from elastic.storage.local import LocalStore
from elastic.storage.store import Store
from elastic.train.state.state import State

DATA = DataRecord(samples=8, epochs=1, steps=8, tail="drop").to_json()


def begin_run(folder: Path, ours: Identity) -> Path:
    folder.mkdir(parents=True)
    (folder / identity.NAME).write_bytes(ours.to_json())
    return folder


def commit_in(folder: Path, ours: Identity, step: int, state: State) -> CommitRecord:
    return commit_state(LocalStore(folder / "checkpoints"), ours.run_id, step, state)


def damage(folder: Path, step: int) -> None:
    """Change one bit of the payload of this step."""
    payload = max(folder.glob(f"checkpoints/{step:012d}/*/*.safetensors"))
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)


def commit_state(store: Store, run_id: str, step: int, state: State) -> CommitRecord:
    flat = state.flatten()
    laid_out = image.layout(flat.tensors, flat.to_json() | {"chain": "12" * 32, "data": DATA})
    data = bytearray(laid_out.size_bytes)
    image.copy_into(laid_out, memoryview(data))
    return commit_image(store, run_id, step, data)


def commit_image(store: Store, run_id: str, step: int, data: bytearray, generation: int = 1) -> CommitRecord:
    return commit_payload(store, data, step, generation=generation, run_id=run_id).record
