"""A header is believed only as far as the image's bytes bear it out.

An image is a safetensors file: 8 bytes header length, header (JSON), tensor bytes. Tensors that
share their memory are stored once; `ties` names the others. All are stored in row-major order;
`strides` has those of tensors that had others.

It does not promise that the bytes are those that were written.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.errors import CheckpointDamaged

PAGE, WORD_BYTES = 4096, 8
LENGTH = struct.Struct("<Q")
DOCUMENT = "elastic"
TIES = "elastic.ties"
STRIDES = "elastic.strides"
METADATA = "__metadata__"
# Name in the file: (name in torch, bytes of an element).
DTYPES = {
    "F64": ("torch.float64", 8),
    "F32": ("torch.float32", 4),
    "F16": ("torch.float16", 2),
    "BF16": ("torch.bfloat16", 2),
    "I64": ("torch.int64", 8),
    "I32": ("torch.int32", 4),
    "I16": ("torch.int16", 2),
    "I8": ("torch.int8", 1),
    "U8": ("torch.uint8", 1),
    "BOOL": ("torch.bool", 1),
    "C64": ("torch.complex64", 8),
}

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor: its bytes, in row-major order, are those of the image from `start` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """ties: names of further tensors, each with the name in `entries` whose bytes it shares.

    strides: in elements, of entries that were not row-major; each is a permutation of row-major.
    """

    entries: dict[str, TensorEntry]
    ties: dict[str, str]
    strides: dict[str, tuple[int, ...]]
    document: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where tensors go in an image, counted from the end of the header.

    entries: JSON of the header. starts: of those that have bytes. partial_words_at: of the first
    tensor whose bytes are no whole 64-bit words, or the end.
    """

    entries: str
    starts: tuple[tuple[str, int], ...]
    partial_words_at: int
    size_bytes: int


def plan(forms: Mapping[str, tuple[str, Sequence[int]]]) -> Plan:
    """First come the tensors of whole 64-bit words, then the others, each time those with the
    largest elements first. So each lies on a multiple of its element's size.

    forms: the dtype and the shape of each tensor.
    """
    elements = {name: DTYPES[dtype][1] for name, (dtype, _) in forms.items()}
    sizes = {name: math.prod(shape) * elements[name] for name, (_, shape) in forms.items()}
    starts, offset = {}, 0
    for name in sorted(forms, key=lambda name: (sizes[name] % WORD_BYTES != 0, -elements[name])):
        starts[name] = offset
        offset += sizes[name]
    entries = {
        name: {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [starts[name], starts[name] + sizes[name]],
        }
        for name, (dtype, shape) in forms.items()
    }
    return Plan(
        entries=json.dumps(entries, separators=(",", ":")),
        starts=tuple((name, start) for name, start in starts.items() if sizes[name]),
        partial_words_at=sum(size for size in sizes.values() if not size % WORD_BYTES),
        size_bytes=offset,
    )


def head(entries: str, metadata: Mapping[str, str]) -> bytes:
    """The length word and the header, padded so that the data begins on a page.

    entries: those of a Plan.
    """
    first = json.dumps({METADATA: metadata}, separators=(",", ":"))
    text = (first if entries == "{}" else f"{first[:-1]},{entries[1:]}").encode()
    text += b" " * (-(len(text) + LENGTH.size) % PAGE)
    return LENGTH.pack(len(text)) + text


def parse(image: Buffer, size_bytes: int | None = None) -> Header:
    """Raises CheckpointDamaged for bytes that are no image, or announce more than there is.

    size_bytes: of the image, where only its first bytes are given.
    """
    view = memoryview(image)
    size_bytes = len(view) if size_bytes is None else size_bytes
    try:
        (length,) = LENGTH.unpack_from(view)
        data_at = LENGTH.size + length
        if data_at > len(view):
            raise ValueError(f"a header of {length} bytes is announced, {size_bytes} bytes are there in all")
        header = json.loads(bytes(view[LENGTH.size : data_at]))
        metadata = header.pop(METADATA)
        document = json.loads(metadata[DOCUMENT])
        entries = {name: _entry(fields, data_at, size_bytes) for name, fields in header.items()}
        ties = json.loads(metadata[TIES])
        for name, first in ties.items():
            if name in entries or first not in entries:
                raise ValueError(f"{name!r} is tied to {first!r}, which cannot be")
        strides = {name: _strides(entries[name], of) for name, of in json.loads(metadata[STRIDES]).items()}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise CheckpointDamaged(f"the payload is not a training state: {error}") from error
    return Header(entries=entries, ties=ties, strides=strides, document=document)


def _entry(fields: dict[str, Any], data_at: int, image_bytes: int) -> TensorEntry:
    """Raises ValueError, KeyError or TypeError unless shape, dtype and bytes agree."""
    dtype, shape, (start, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    _, element_bytes = DTYPES[dtype]
    if not isinstance(shape, list) or not all(type(each) is int and 0 <= each < 2**63 for each in shape):
        raise ValueError(f"a tensor cannot have the shape {shape!r:.80}")
    if type(start) is not int or type(end) is not int or not 0 <= start <= end <= image_bytes - data_at:
        raise ValueError(f"offsets {start}..{end} lie outside {image_bytes - data_at} bytes of data")
    if end - start != math.prod(shape) * element_bytes:
        raise ValueError(f"a tensor of shape {shape!r:.80} and dtype {dtype} has {end - start} bytes")
    return TensorEntry(dtype=dtype, shape=tuple(shape), start=data_at + start, end=data_at + end)


def _strides(entry: TensorEntry, strides: Any) -> tuple[int, ...]:
    """Raises ValueError or TypeError for strides with gaps or overlaps: they would need more memory
    than the entry has, or read outside it.
    """
    if any(type(each) is not int or not 0 <= each < 2**63 for each in strides):
        raise ValueError(f"a tensor cannot have the strides {strides!r:.80}")
    expected = 1
    for stride, size in sorted(pair for pair in zip(strides, entry.shape, strict=True) if pair[1] != 1):
        if stride != expected:
            raise ValueError(
                f"a tensor of shape {list(entry.shape)!r:.80} cannot have the strides {strides!r:.80}"
            )
        expected *= size
    return tuple(strides)
