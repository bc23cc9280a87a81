"""A run directory with committed states, written as a run writes them."""

import os
from pathlib import Path

import torch
from payloads import hashes_of

from elastic.checkpoint.commit import WriteLimits, commit
from elastic.checkpoint.record import CommitRecord, Save
from elastic.config import identity
from elastic.config.identity import Identity
from elastic.data.record import DataRecord
from elastic.snapshot import image
from elastic.storage.local import LocalStore
from elastic.storage.store import Payload, Store
from elastic.system.clock import SystemClock
from elastic.train.state.state import State

DATA = DataRecord(samples=8, epochs=1, steps=8, tail="drop").to_json()


def begin_run(folder: Path, ours: Identity) -> Path:
    folder.mkdir(parents=True)
    (folder / identity.NAME).write_bytes(ours.to_json())
    return folder


def commit_in(folder: Path, ours: Identity, step: int, state: State) -> CommitRecord:
    return commit_state(LocalStore(folder / "checkpoints"), ours.run_id, step, state)


def commit_state(store: Store, run_id: str, step: int, state: State) -> CommitRecord:
    flat = state.flatten()
    laid_out = image.layout(flat.tensors, flat.to_json() | {"chain": "12" * 32, "data": DATA})
    data = bytearray(laid_out.size_bytes)
    image.copy_into(laid_out, memoryview(data))
    return commit_image(store, run_id, step, data)


def commit_image(store: Store, run_id: str, step: int, data: bytearray, generation: int = 1) -> CommitRecord:
    """As a writer without an agent, which no fence stops."""
    clock, fd = SystemClock(), os.memfd_create("image")
    os.write(fd, data)
    try:
        done = commit(
            store,
            Payload(fd=fd, size_bytes=len(data)),
            Save(
                run_id=run_id,
                step=step,
                epoch=0,
                generation=generation,
                world_size=1,
                torch=torch.__version__,
            ),
            limits=WriteLimits(deadline=clock.monotonic() + 100.0, is_fenced=lambda: False),
            clock=clock,
            reached=lambda _point: None,
            hashed=lambda: hashes_of(data),
        )
    finally:
        os.close(fd)
    return done.record
