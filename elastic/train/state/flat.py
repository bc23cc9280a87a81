"""A flattened state has a checksum that depends on its values alone, on whichever device they are.

Where a tensor begins in its memory stands beside it, for that is part of what its numbers become:
kernels for vectors take the elements up to the next boundary by themselves, so that a sum over a
tensor that begins elsewhere is rounded otherwise (MKL's dot and matrix products do). torch begins
its own memory on a boundary. A view of a part of it may begin anywhere, such as a parameter that
`vector_to_parameters` cut from a vector, or a kept gradient, which is cut from that of all.

Counted is from the beginning of that memory. What other programs allocated (an array of NumPy) may
begin anywhere, in each process elsewhere, and ranks would seem to have different states.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elastic.data.fingerprint import real_numbers
from elastic.errors import CheckpointDamaged
from elastic.proof.evidence import Evidence
from elastic.snapshot import checksum
from elastic.snapshot.image import device_bytes, tensor_bytes

BOUNDARY = 64  # bytes; torch's allocator of the CPU keeps it, and that of GPUs one of 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A flattened state: tensors by name, and the rest as one JSON value that refers to them.

    about: what stands beside the state and does not count in its digest. `layers` has for each
    module the versions of its layers, `alignments` those of tensors that do not begin on a
    boundary, `built` what the recipe built before the loop, and `now` its structure in the loop
    (built.py).
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
    def alignments(self) -> dict[str, int]:
        """By name, where it is not 0."""
        found: dict[str, int] = self.about.get("alignments", {})
        return found


def alignment(tensor: Tensor) -> int:
    """Bytes from the last boundary before its first element to that, in its memory."""
    return int(tensor.storage_offset()) * tensor.itemsize % BOUNDARY


def copy_at(tensor: Tensor, place: int) -> Tensor:
    """A copy of the same strides, but for gaps, in memory of its own, at the alignment
    `place`. place: bytes, a multiple of an element's.
    """
    like = torch.empty_like(tensor, requires_grad=False)
    if place:
        first = place // tensor.itemsize
        memory = like.new_empty(first + tensor.numel())
        like = memory.as_strided(like.shape, like.stride(), first)
    return like.copy_(tensor.detach())


def checksum_of(flat: FlatState) -> Evidence:
    """The same on every device, for every stride and address of the tensors."""
    entries = {}
    for name, tensor in flat.tensors.items():
        head = f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode()
        entries[name] = hashlib.sha256(head + tensor_sums(tensor)).hexdigest()
    for name, value in flat.document.items():
        entries[f"{name} (values)"] = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    return Evidence(entries)


def state_evidence(flat: FlatState, checksum: Evidence | None = None) -> Evidence:
    """The digest's contents, and modes, frozen parameters and parameter groups.

    checksum: of the state, for a caller that has it.
    """
    entries = dict((checksum or checksum_of(flat)).entries)
    for what, of_kind in flat.about.get("now", {}).items():
        named = of_kind if isinstance(of_kind, dict) else dict.fromkeys(of_kind, True)
        entries |= {f"{name} ({what})": json.dumps(value) for name, value in named.items()}
    return Evidence(entries)


def tensor_checksum(tensor: Tensor) -> str:
    """A checksum of a tensor's dtype, shape and bytes, where all NaNs count as one."""
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
