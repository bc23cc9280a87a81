"""A flattened state has a checksum that depends on its values alone, on whichever device they are.

It says how it was written, so that a state of an earlier version is known as such.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from elastic.data.fingerprint import real_numbers
from elastic.errors import CheckpointDamaged
from elastic.proof.evidence import Evidence
from elastic.snapshot import checksum
from elastic.snapshot.image import device_bytes, tensor_bytes
from elastic.system.untrusted import decode as decode_fields
from elastic.train.state.alignment import BOUNDARY
from elastic.train.state.built import Built, Structure

VERSION = 2  # 1 had neither the order of dicts nor strides, and not the versions of layers

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A flattened state: tensors by name, and the rest as one JSON value that refers to them.

    about: what stands beside the state and does not count in its digest. `version` is that of the
    document, `layers` has for each module the versions of its layers, `orders` the orders of keys
    that the document does not have (key_order.py), `alignments` of tensors that do not begin on a
    boundary (alignment.py), `built` what the recipe built before the loop, and `now` its structure
    in the loop (as_built.py).
    """

    tensors: dict[str, Tensor]
    document: Any
    about: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All but the tensors, for the document of an image, which may hold more than this."""
        return {"state": self.document, "about": self.about}

    @staticmethod
    def read(tensors: dict[str, Tensor], image_document: Any) -> "FlatState":
        """Raises CheckpointDamaged unless the document is that of an image of a state."""
        if isinstance(image_document, dict):
            state, about = image_document.get("state"), image_document.get("about", {})
            if isinstance(state, dict) and isinstance(about, dict):
                return FlatState(tensors=tensors, document=state, about=about)
        raise CheckpointDamaged("the payload is not a training state: its document lacks a state")

    @property
    def is_exact(self) -> bool:
        return self.about.get("version") == VERSION

    @property
    def alignments(self) -> dict[str, int] | None:
        """By name; None of a state that earlier code saved. Raises CheckpointDamaged."""
        found = self.about.get("alignments") if self.is_exact else None
        if found is None:
            return None
        for name, place in found.items() if isinstance(found, dict) else [("", found)]:
            tensor = self.tensors.get(name)
            if tensor is None or type(place) is not int or place not in range(0, BOUNDARY, tensor.itemsize):
                raise CheckpointDamaged(f"a tensor {name!r:.80} cannot have the alignment {place!r:.80}")
        return dict(found)

    @property
    def built(self) -> Built | None:
        """None of a state that earlier code saved. Raises CheckpointDamaged."""
        return self._read(Built, "built") if "built" in self.about else None

    @property
    def structure(self) -> Structure:
        """Raises CheckpointDamaged."""
        return self._read(Structure, "now")

    def _read(self, kind: type[T], key: str) -> T:
        try:
            return decode_fields(
                kind, self.about.get(key), what=f"the structure {key!r} of a state", exact=False
            )
        except ValueError as error:
            raise CheckpointDamaged(str(error)) from error


def checksum_of(flat: FlatState) -> Evidence:
    """The same on every device, for every stride and address of the tensors."""
    entries = {}
    for name, tensor in flat.tensors.items():
        head = f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode()
        entries[name] = hashlib.sha256(head + tensor_sums(tensor)).hexdigest()
    for name, value in flat.document.items():
        entries[f"{name} (values)"] = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    return Evidence(entries)


def tensor_checksum(tensor: Tensor) -> str:
    """Of a tensor's dtype, shape and bytes, where all NaNs count as one."""
    head = f"{tensor.dtype} {list(tensor.shape)}\n".encode()
    return hashlib.sha256(head + tensor_sums(real_numbers(tensor))).hexdigest()


def tensor_sums(tensor: Tensor) -> bytes:
    """`checksum.tensor_sums` of a tensor's bytes. On a GPU the same sums are computed there."""
    if tensor.device.type == "cpu" or tensor.nbytes <= checksum.SMALL_BYTES:
        return checksum.tensor_sums(tensor_bytes(tensor).numpy().data)
    flat = device_bytes(tensor)
    words, cut = checksum.stretch_words(flat.numel())
    stretches = flat[:cut].view(torch.int64).view(checksum.STRETCHES, words).sum(1)
    return stretches.cpu().numpy().tobytes() + flat[cut:].cpu().numpy().tobytes()


def array_sums(array: Any) -> bytes:
    """The same of an array of NumPy."""
    return checksum.tensor_sums(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def sha256_of(things: list[Any]) -> str:
    """16 digits of dense tensors and arrays, the same on every device."""
    found = hashlib.sha256()
    for thing in things:
        found.update(f"{thing.dtype} {list(thing.shape)}\n".encode())
        is_tensor = isinstance(thing, Tensor)
        found.update(
            tensor_sums(thing.detach().resolve_conj().resolve_neg()) if is_tensor else array_sums(thing)
        )
    return found.hexdigest()[:16]
