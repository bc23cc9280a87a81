"""A header is believed only as far as the image's bytes bear it out.

An image is a safetensors file: 8 bytes header length, header (JSON), tensor bytes. Tensors that
share their memory are stored once; `ties` names the others. All are stored in row-major order;
`strides` has those of tensors that had others. The digest of a state is computed here
from an image's bytes alone, without torch, so that the uploader can say which state it stores.

It does not promise that the bytes are those that were written.
"""

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from typing import Any

from elastic.errors import CheckpointDamaged

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


def parse(image: Buffer, size_bytes: int | None = None) -> Header:
    """Raises CheckpointDamaged for what is no image, or announces more than there is.

    size_bytes: of the image, where only its first bytes are given.
    """
    view = memoryview(image)
    size_bytes = len(view) if size_bytes is None else size_bytes
    try:
        (length,) = LENGTH.unpack_from(view)
        data_at = LENGTH.size + length
        if data_at > len(view):
            raise ValueError(f"a header of {length} bytes is announced, {len(view)} bytes are there in all")
        header = json.loads(bytes(view[LENGTH.size : data_at]))
        metadata = header.pop(METADATA)
        document = json.loads(metadata[DOCUMENT])
        entries = {name: _entry(fields, data_at, size_bytes) for name, fields in header.items()}
        ties = json.loads(metadata[TIES])
        for name, first in ties.items():
            if name in entries or first not in entries:
                raise ValueError(f"{name!r} is tied to {first!r}, which cannot be")
        # Of images that earlier code wrote they are not known.
        strides = {
            name: _strides(entries[name], of) for name, of in json.loads(metadata.get(STRIDES, "{}")).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise CheckpointDamaged(f"the payload is not a training state: {error}") from error
    return Header(entries=entries, ties=ties, strides=strides, document=document)


class StateDigest:
    """sha256 of the whole state in a canonical order, from an image whose bytes come in pieces.

    It is computed from the sha256 of each entry, sorted by name: of each tensor (name, dtype, shape
    and bytes, tied ones included), and of the other values of each object. Where the tensors lie in
    the image does not count. The state is in the document under "state".
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._at = 0  # bytes of the image so far
        self._head = b""  # those bytes, until the header is whole
        self._header: Header | None = None
        self._begun: list[tuple[TensorEntry, Any]] = []  # of each tensor, tied ones included

    def add(self, piece: Buffer) -> None:
        """The next bytes of the image. Raises CheckpointDamaged."""
        view, at = memoryview(piece), self._at
        self._at += len(view)
        if self._header is None:
            if self._head:
                self._head += view
                view, at = memoryview(self._head), 0
            if len(view) < min(_header_bytes(view, self._size_bytes), self._size_bytes):
                self._head = bytes(view)
                return
            self._begin(parse(view, self._size_bytes))
        for entry, digest in self._begun:
            # One call for all bytes: hashlib lets other threads run only during a call with a large
            # piece.
            start, end = max(0, entry.start - at), max(0, entry.end - at)
            if part := view[start:end]:
                digest.update(part)

    def _begin(self, header: Header) -> None:
        self._header, self._head = header, b""
        named = header.entries | {name: header.entries[first] for name, first in header.ties.items()}
        for name, entry in named.items():
            dtype, _ = DTYPES[entry.dtype]
            self._begun.append((entry, hashlib.sha256(f"{name} {dtype} {list(entry.shape)}\n".encode())))
        self._names = list(named)

    def hexdigest(self) -> str:
        """64 hexadecimal digits, after the last piece. Raises CheckpointDamaged."""
        if self._header is None:  # too short; this says so
            self._begin(parse(self._head, self._size_bytes))
        assert self._header is not None
        document = self._header.document
        values = document.get("state") if isinstance(document, dict) else None
        if not isinstance(values, dict):
            raise CheckpointDamaged("the payload is not a training state: its document lacks a state")
        digests = {
            name: digest.hexdigest() for name, (_, digest) in zip(self._names, self._begun, strict=True)
        }
        for name, value in values.items():
            digests[f"{name} (values)"] = hashlib.sha256(json.dumps(value).encode()).hexdigest()
        return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def digest(image: Buffer) -> str:
    """`StateDigest` of a whole image. Raises CheckpointDamaged."""
    found = StateDigest(memoryview(image).nbytes)
    found.add(image)
    return found.hexdigest()


def check_digest(found: str, expected: str) -> None:
    """Raises CheckpointDamaged where a payload holds another state than its record says."""
    if found != expected:
        raise CheckpointDamaged(f"expected a state of the digest {expected[:16]}, found {found[:16]}")


def _header_bytes(view: memoryview, size_bytes: int) -> int:
    """Bytes of the header and its length word, as far as they are known."""
    if len(view) < LENGTH.size:
        return min(LENGTH.size, size_bytes)
    return LENGTH.size + int(LENGTH.unpack_from(view)[0])


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
