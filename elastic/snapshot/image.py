"""A training state as one byte image that any safetensors reader opens: tensors as they are, the rest as JSON in the header, no pickle.

Layout: 8 bytes header length, header (JSON, padded with spaces so that the data starts on a page), tensor bytes one after the other, those with
the largest elements first, so that each lies on a multiple of its element's size and can be used where it is.
The image does not protect itself: its checksum stands beside the snapshot, its sha256 in the commit record.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic.errors import CheckpointDamaged, StateNotSavable
from elastic.snapshot import contents
from elastic.snapshot.contents import DOCUMENT, LENGTH, METADATA, TIES, Buffer, Entry

PAGE = 4096
NAMES: dict[str, torch.dtype] = {
    name: getattr(torch, text.removeprefix("torch.")) for name, (text, _) in contents.DTYPES.items()
}
DTYPES = {dtype: name for name, dtype in NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """An image before it is written: its first bytes, and each tensor with the offset in the image at which its bytes belong."""

    head: bytes
    places: tuple[tuple[int, Tensor], ...]
    size_bytes: int


def layout(tensors: Mapping[str, Tensor], document: Any) -> Layout:
    """Raises StateNotSavable with the name of the entry that the format does not know."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
            raise StateNotSavable(
                f"state entry {name}: expected a dense tensor of a plain dtype, found {tensor.layout} {tensor.dtype}; "
                "convert it in the object's state_dict"
            )
    ties = _ties(tensors)
    stored = [(name, tensor) for name, tensor in tensors.items() if name not in ties]
    starts, offset = {}, 0
    for name, tensor in sorted(stored, key=lambda each: -each[1].element_size()):
        starts[name] = offset
        offset += tensor.nbytes
    head = _head(stored, starts, {DOCUMENT: json.dumps(document), TIES: json.dumps(ties)})
    places = tuple((len(head) + starts[name], tensor) for name, tensor in stored if tensor.numel())
    return Layout(head=head, places=places, size_bytes=len(head) + offset)


def copy_into(laid_out: Layout, body: bytearray | memoryview) -> None:
    """Write the image into the first `size_bytes` of a body, whose start must be aligned to 8 bytes."""
    body[: len(laid_out.head)] = laid_out.head
    target = np.frombuffer(body, dtype=np.uint8)
    for offset, tensor in laid_out.places:
        source, end = tensor.detach().resolve_conj().resolve_neg(), offset + tensor.nbytes
        if source.device.type == "cpu" and source.is_contiguous():
            # By one thread: torch's several wait for each other, and where other processes use the processors, as ranks
            # of one node do, that costs twenty times what they win (90 MB: 8 ms by one; by two 6 ms alone, 200 ms among others). numpy lets
            # other threads run Python meanwhile.
            target[offset:end] = tensor_bytes(source).numpy()
        else:
            torch.from_numpy(target[offset:end]).view(tensor.dtype).view(tensor.shape).copy_(source)


def read(image: Buffer, *, copy: bool = True) -> tuple[dict[str, Tensor], Any]:
    """Tensors (host memory) and document of an image, each tensor with memory of its own. Raises CheckpointDamaged when it is none.

    copy=False: the tensors are views of the image, which must be writable and stay; writing to one changes it, and those that are tied to it.
    """
    found, view = contents.parse(image), memoryview(image)
    try:
        tensors = {name: _tensor(entry, view, copy=copy) for name, entry in found.entries.items()}
    except (RuntimeError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"the payload is not a training state: {error}") from error
    for name, first in found.ties.items():
        tensors[name] = tensors[first].clone() if copy else tensors[first]
    return tensors, found.document


def tensor_bytes(tensor: Tensor) -> Tensor:
    """uint8 [n]: the bytes of a tensor in row-major order, in host memory, without a copy where that is possible."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _head(stored: list[tuple[str, Tensor]], starts: Mapping[str, int], metadata: dict[str, str]) -> bytes:
    """The header, its length word included, padded so that it ends on a page."""
    entries: dict[str, Any] = {METADATA: metadata}
    for name, tensor in stored:
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], starts[name] + tensor.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + LENGTH.size) % PAGE)
    return LENGTH.pack(len(text)) + text


def _ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors that share all their memory with one named before: they are written once."""
    first_at: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        first = first_at.setdefault(place, name)
        if first != name and tensor.numel():
            ties[name] = first
    return ties


def _tensor(entry: Entry, view: memoryview, *, copy: bool) -> Tensor:
    dtype = NAMES[entry.dtype]
    if entry.start == entry.end:
        return torch.empty(entry.shape, dtype=dtype)
    # Only other writers of the format put a tensor where its elements do not begin on a multiple of their size.
    is_usable_in_place = not entry.start % dtype.itemsize
    # bytearray: torch wants memory of its own that may be written to.
    data = (
        view[entry.start : entry.end]
        if is_usable_in_place and not copy
        else bytearray(view[entry.start : entry.end])
    )
    return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)
