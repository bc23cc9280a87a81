"""A training state as one byte image that any safetensors reader opens: tensors as they are, the rest as JSON in the header, no pickle.

Layout: 8 bytes header length, header (JSON, padded with spaces so that the data starts on a page), tensor bytes one after the other: first those of whole
64-bit words, then the others, each time those with the largest elements first. So each lies on a multiple of its element's size and can be used where it is.
The image does not protect itself: its checksum stands beside the snapshot, its sha256 in the commit record.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from elastic.errors import CheckpointDamaged, StateNotSavable
from elastic.snapshot import safetensors_header
from elastic.snapshot.checksum import WORD_BYTES, Bytes, ImageSum
from elastic.snapshot.safetensors_header import DOCUMENT, LENGTH, METADATA, TIES, Buffer, TensorEntry

PAGE = 4096
NAMES: dict[str, torch.dtype] = {
    name: getattr(torch, text.removeprefix("torch.")) for name, (text, _) in safetensors_header.DTYPES.items()
}
DTYPES = {dtype: name for name, dtype in NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """An image before it is written: its first bytes, and each tensor with the offset in the image at which its bytes belong, in this order.

    broken_at: where the tensors begin, if there are any, whose bytes are no whole 64-bit words.
    """

    head: bytes
    places: tuple[tuple[int, Tensor], ...]
    broken_at: int
    size_bytes: int


def layout(tensors: Mapping[str, Tensor], document: Any) -> Layout:
    """Raises StateNotSavable with the name of the entry that the format does not know."""
    plan = _plan(tuple((name, _Form.of(tensor)) for name, tensor in tensors.items()))
    head = _head(plan, {DOCUMENT: json.dumps(document), TIES: plan.ties})
    places = tuple((len(head) + start, tensors[name]) for name, start in plan.starts)
    return Layout(
        head=head,
        places=places,
        broken_at=len(head) + plan.broken_at,
        size_bytes=len(head) + plan.size_bytes,
    )


def copy_into(laid_out: Layout, body: bytearray | memoryview) -> str:
    """Write the image into the first `size_bytes` of a body, whose start must be aligned to 8 bytes; returns the image's checksum."""
    found = ImageSum(laid_out.size_bytes)
    target = np.frombuffer(body, dtype=np.uint8, count=laid_out.size_bytes)
    _copy(found, target, 0, np.frombuffer(laid_out.head, dtype=np.uint8))
    for offset, tensor in laid_out.places:
        data = tensor_bytes(tensor).numpy()
        if offset < laid_out.broken_at:
            _copy(found, target, offset, data)
        else:
            target[offset : offset + data.nbytes] = data
    for offset, piece in found.pieces(laid_out.broken_at, target[laid_out.broken_at :]):
        found.add(offset, piece)
    return found.digest()


def _copy(found: ImageSum, target: Bytes, offset: int, data: Bytes) -> None:
    """Sum and copy, a piece at a time: where two processes do it at once this takes three quarters of what it takes one after the other.

    By one thread: torch's several wait for each other, and where other processes use the processors, as ranks of one node do, that costs twenty
    times what they win (90 MB: 8 ms by one; by two 6 ms alone, 200 ms among others). numpy lets other threads run Python meanwhile.
    """
    for at, piece in found.pieces(offset, data):
        found.add(at, piece)
        target[at : at + piece.nbytes] = piece


def read(image: Buffer, *, copy: bool = True) -> tuple[dict[str, Tensor], Any]:
    """Tensors (host memory) and document of an image, each tensor with memory of its own. Raises CheckpointDamaged when it is none.

    copy=False: the tensors are views of the image, which must be writable and stay; writing to one changes it, and those that are tied to it.
    """
    found, view = safetensors_header.parse(image), memoryview(image)
    try:
        tensors = {name: _tensor(entry, view, copy=copy) for name, entry in found.entries.items()}
    except (RuntimeError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"the payload is not a training state: {error}") from error
    for name, first in found.ties.items():
        tensors[name] = tensors[first].clone() if copy else tensors[first]
    return tensors, found.document


def tensor_bytes(tensor: Tensor) -> Tensor:
    """uint8 [n]: the bytes of a tensor in row-major order, in host memory, without a copy where that is possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


class _Form(NamedTuple):
    """What of a tensor decides where its bytes go. A tuple, because a state has hundreds and each snapshot compares them all."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    address: int
    stride: tuple[int, ...]
    device: torch.device
    layout: torch.layout
    size_bytes: int

    @staticmethod
    def of(tensor: Tensor) -> "_Form":
        if tensor.layout is not torch.strided:
            return _Form(tensor.dtype, tensor.shape, 0, (), tensor.device, tensor.layout, 0)
        address, stride, layout = tensor.data_ptr(), tensor.stride(), torch.strided
        return _Form(tensor.dtype, tensor.shape, address, stride, tensor.device, layout, tensor.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Where everything of an image goes that has tensors of these forms, counted from the end of the header. starts: of those that have bytes."""

    entries: str
    ties: str
    starts: tuple[tuple[str, int], ...]
    broken_at: int
    size_bytes: int


# From one step to the next the forms stay and only the values change.
@lru_cache(maxsize=1)
def _plan(forms: tuple[tuple[str, _Form], ...]) -> _Plan:
    for name, form in forms:
        if form.dtype not in DTYPES or form.layout is not torch.strided:
            raise StateNotSavable(
                f"state entry {name}: expected a dense tensor of a plain dtype, found {form.layout} {form.dtype}; "
                "convert it in the object's state_dict"
            )
    ties = _ties(forms)
    stored = [(name, form) for name, form in forms if name not in ties]
    sizes = {name: form.size_bytes for name, form in stored}
    starts, offset = {}, 0
    for name, form in sorted(stored, key=_place_in_line):
        starts[name] = offset
        offset += form.size_bytes
    entries = {
        name: {
            "dtype": DTYPES[form.dtype],
            "shape": list(form.shape),
            "data_offsets": [starts[name], starts[name] + sizes[name]],
        }
        for name, form in stored
    }
    return _Plan(
        entries=json.dumps(entries, separators=(",", ":")),
        ties=json.dumps(ties),
        starts=tuple((name, start) for name, start in starts.items() if sizes[name]),
        broken_at=sum(size for size in sizes.values() if not size % WORD_BYTES),
        size_bytes=offset,
    )


def _place_in_line(named: tuple[str, _Form]) -> tuple[bool, int]:
    _, form = named
    return form.size_bytes % WORD_BYTES != 0, -form.dtype.itemsize


def _ties(forms: Iterable[tuple[str, _Form]]) -> dict[str, str]:
    """Names of tensors that share all their memory with one named before: they are written once."""
    first_at: dict[_Form, str] = {}
    ties = {}
    for name, form in forms:
        first = first_at.setdefault(form, name)
        if first != name and form.size_bytes:
            ties[name] = first
    return ties


def _head(plan: _Plan, metadata: dict[str, str]) -> bytes:
    """The header, its length word included, padded so that it ends on a page."""
    first = json.dumps({METADATA: metadata}, separators=(",", ":"))
    text = (first if plan.entries == "{}" else f"{first[:-1]},{plan.entries[1:]}").encode()
    text += b" " * (-(len(text) + LENGTH.size) % PAGE)
    return LENGTH.pack(len(text)) + text


def _tensor(entry: TensorEntry, view: memoryview, *, copy: bool) -> Tensor:
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
