"""A training state as one byte image that any safetensors reader opens, and that needs no pickle.

Tensors are stored as they are, the rest as JSON in the header. Layout: 8 bytes header length;
header (JSON, padded with spaces so that the data starts on a page); the tensors' bytes without
gaps, in an order (safetensors_header.py) in which each can be used where it is, without a copy.

The image does not protect itself: its checksum stands beside the snapshot, its sha256 in the commit
record.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from elastic.errors import CheckpointDamaged, StateNotSavable
from elastic.snapshot import safetensors_header
from elastic.snapshot.checksum import WORD_BYTES, Bytes, ImageChecksum
from elastic.snapshot.safetensors_header import DOCUMENT, STRIDES, TIES, Plan, TensorEntry
from elastic.snapshot.sharded import is_sharded, local

NAMES: dict[str, torch.dtype] = {
    name: getattr(torch, text.removeprefix("torch.")) for name, (text, _) in safetensors_header.DTYPES.items()
}
DTYPES = {dtype: name for name, dtype in NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """An image before it is written.

    head: its first bytes. places: (offset in the image, tensor), in the order of the offsets.
    partial_words_at: the offset of the first tensor whose bytes are no whole 64-bit words, or of
    the end.
    """

    head: bytes
    places: tuple[tuple[int, Tensor], ...]
    partial_words_at: int
    size_bytes: int


def layout(tensors: Mapping[str, Tensor], document: Any) -> Layout:
    """Where everything goes in an image of these tensors and this JSON document.

    Raises StateNotSavable with the name of a tensor whose dtype or layout the format does not know.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
            raise StateNotSavable(
                f"state entry {name}: expected a dense tensor of a plain dtype, found {tensor.layout} {tensor.dtype}; "
                "convert it in the object's state_dict"
            )
    plan, ties, strides = _plan(tuple((name, _Form.of(tensor)) for name, tensor in tensors.items()))
    metadata = {DOCUMENT: json.dumps(document), TIES: ties, STRIDES: strides}
    head = safetensors_header.head(plan.entries, metadata)
    at = len(head)
    places = tuple((at + start, tensors[name]) for name, start in plan.starts)
    return Layout(
        head=head, places=places, partial_words_at=at + plan.partial_words_at, size_bytes=at + plan.size_bytes
    )


def copy_into(laid_out: Layout, body: bytearray | memoryview) -> str:
    """Write the image into the first `size_bytes` of a body; returns the image's checksum.

    The body's start must be aligned to 8 bytes.
    """
    return LiveChecksum(laid_out, np.frombuffer(body, np.uint8, laid_out.size_bytes)).hexdigest()


class LiveChecksum:
    """The checksum of the image that is laid out, as its tensors are now.

    Without a copy, tensors of a GPU are summed there, behind the kernels that compute them, and
    `hexdigest` waits for the sums. What changes the tensors in between changes nothing here.
    """

    def __init__(self, laid_out: Layout, copy: Bytes | None = None) -> None:
        """copy: takes the image as well."""
        self._copy = copy
        self._found = found = ImageChecksum(laid_out.size_bytes)
        self._sums: list[tuple[int, Tensor]] = []  # of pieces on a GPU: offset, int64 []
        # From here on tensors are no whole words; (offset, uint8 [n]) of those on a GPU.
        self._partial_at = laid_out.partial_words_at
        size_bytes = laid_out.size_bytes - self._partial_at
        self._partial = np.zeros(size_bytes, np.uint8) if copy is None else copy[self._partial_at :]
        self._partial_there: list[tuple[int, Tensor]] = []
        self._add_here(0, np.frombuffer(laid_out.head, dtype=np.uint8))
        for offset, tensor in laid_out.places:
            if copy is not None or tensor.device.type == "cpu":
                self._add_here(offset, tensor_bytes(tensor).numpy())
            elif offset >= self._partial_at:
                self._partial_there.append((offset, device_bytes(tensor).clone()))
            else:
                pieces = found.pieces(offset, words_there(tensor))
                self._sums += [(at, piece.view(torch.int64).sum()) for at, piece in pieces]

    def hexdigest(self) -> str:
        """Call once."""
        found, partial = self._found, self._partial_there
        if self._sums:
            sums = torch.stack([each for _, each in self._sums]).tolist()
            for (offset, _), words in zip(self._sums, sums, strict=True):
                found.add_sum(offset, words)
        if partial:
            data = torch.cat([each for _, each in partial]).cpu().numpy()
            ends = np.cumsum([each.nbytes for _, each in partial])
            for (offset, _), part in zip(partial, np.split(data, ends[:-1]), strict=True):
                self._add_here(offset, part)
        for offset, piece in found.pieces(self._partial_at, self._partial):
            found.add(offset, piece)
        return found.hexdigest()

    def _add_here(self, offset: int, data: Bytes) -> None:
        """Sum and copy, a piece at a time, by one thread.

        A piece that was just summed is still in the processor's cache. If two ranks of a node do it
        at the same time, this takes three quarters of the time of a pass for each. torch's copy
        would take several threads, which wait for each other. When the other ranks of a node use
        the processors, that costs twenty times what it wins (90 MB: 8 ms by one thread; by two
        threads 6 ms on an idle machine, 200 ms beside another rank). numpy lets other Python
        threads run meanwhile.
        """
        if offset >= self._partial_at:
            start = offset - self._partial_at
            self._partial[start : start + data.nbytes] = data
            return
        for at, piece in self._found.pieces(offset, data):
            self._found.add(at, piece)
            if self._copy is not None:
                self._copy[at : at + piece.nbytes] = piece


def words_there(tensor: Tensor) -> Tensor:
    """The same, in memory that can be seen as 64-bit words."""
    found = device_bytes(tensor)
    return found.clone() if found.storage_offset() % WORD_BYTES else found


def read(image: bytearray | memoryview) -> tuple[dict[str, Tensor], Any]:
    """Tensors (in host memory) and document of an image.

    They are views of the image, which must be writable and outlive them, and writing to one changes
    the image. Tensors that shared all their memory share it again. A tensor that was not row-major
    gets memory of its own, and its strides. Raises CheckpointDamaged when it is no image.
    """
    found, view = safetensors_header.parse(image), memoryview(image)
    try:
        strides = found.strides
        tensors = {name: _tensor(each, view, strides.get(name)) for name, each in found.entries.items()}
    except (RuntimeError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"the payload is not a training state: {error}") from error
    for name, first in found.ties.items():
        tensors[name] = tensors[first]
    return tensors, found.document


def ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """By name, of each tensor that shares all its memory with one of an earlier name: that one's.

    The same of tensors that were written and of those that were read.
    """
    return _ties((name, _Form.of(tensor)) for name, tensor in sorted(tensors.items()))


def tensor_bytes(tensor: Tensor) -> Tensor:
    """uint8 [n]: the bytes of a tensor, row-major, in host memory; a view where possible."""
    return device_bytes(tensor.cpu())


def device_bytes(tensor: Tensor) -> Tensor:
    """As `tensor_bytes`, where the tensor lies."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element or none is contiguous with any stride, which no view of its bytes can
    # have.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a tensor, if they are not row-major, and leave no gaps and no overlaps.

    Those of a channels_last or a transposed tensor. Where a view has gaps, as every second column
    has, None: its copy is row-major.
    """
    sizes = list(zip(strides, shape, strict=True))
    row_major, span = True, 1
    for stride, size in reversed(sizes):
        row_major, span = row_major and stride == span, span * size
    if row_major or span == 0:
        return None
    expected = 1
    for stride, size in sorted(pair for pair in sizes if pair[1] > 1):
        if stride != expected:
            return None
        expected *= size
    return tuple(strides)


class _Form(NamedTuple):
    """The properties of a tensor that decide where its bytes go.

    A tuple, because each snapshot hashes and compares those of all tensors of a state, hundreds of
    them.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    address: int
    stride: tuple[int, ...]
    device: torch.device
    size_bytes: int
    # Views that read the same memory as other numbers: z and z.conj(), z.imag and z.conj().imag.
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(tensor: Tensor) -> "_Form":
        address = local(tensor).data_ptr()
        if not address and is_sharded(tensor):  # no rows, which have no address: by what would hold them
            address = local(tensor).untyped_storage()._cdata  # noqa: SLF001
        stride, device = tensor.stride(), tensor.device
        views = tensor.is_conj(), tensor.is_neg()
        return _Form(tensor.dtype, tensor.shape, address, stride, device, tensor.nbytes, *views)


# From one step to the next the forms stay and only the values change: one plan serves the whole
# run.
@lru_cache(maxsize=1)
def _plan(forms: tuple[tuple[str, _Form], ...]) -> tuple[Plan, str, str]:
    """The plan of an image of such tensors, and its ties and strides as JSON."""
    ties = _ties(forms)
    stored = {name: form for name, form in forms if name not in ties}
    of_each = ((name, dense_strides(form.shape, form.stride)) for name, form in stored.items())
    strides = {name: strides for name, strides in of_each if strides}
    planned = safetensors_header.plan(
        {name: (DTYPES[form.dtype], form.shape) for name, form in stored.items()}
    )
    return planned, json.dumps(ties), json.dumps(strides)


def _ties(forms: Iterable[tuple[str, _Form]]) -> dict[str, str]:
    """Tensors that share all memory with an earlier one, with its name: written once."""
    first_at: dict[_Form, str] = {}
    ties = {}
    for name, form in forms:
        first = first_at.setdefault(form, name)
        if first != name and form.size_bytes:
            ties[name] = first
    return ties


def _tensor(entry: TensorEntry, view: memoryview, strides: Sequence[int] | None) -> Tensor:
    dtype = NAMES[entry.dtype]
    if entry.start == entry.end:
        return torch.empty(entry.shape, dtype=dtype)
    if entry.start % dtype.itemsize:  # it could not be used in place; another program's image
        raise ValueError(f"a tensor of dtype {entry.dtype} begins at byte {entry.start}")
    tensor = torch.frombuffer(view[entry.start : entry.end], dtype=dtype).reshape(entry.shape)
    return tensor if strides is None else torch.empty_strided(entry.shape, strides, dtype=dtype).copy_(tensor)
