"""A training state as one byte image that any safetensors reader opens: tensors as they are, the rest as JSON in the header, no pickle.

Layout: 8 bytes header length, header (JSON, padded with spaces so that the data starts on a page), tensor bytes one after the other.
The image does not protect itself: its sha256 stands in the commit record.
"""

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from elastic.errors import CheckpointDamaged, StateNotSavable

PAGE = 4096
LENGTH = struct.Struct("<Q")
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
NAMES = {name: dtype for dtype, name in DTYPES.items()}
DOCUMENT = "elastic"
TIES = "elastic.ties"


def tensor_bytes(tensor: Tensor) -> Tensor:
    """uint8 [n]: the bytes of a tensor in row-major order, in host memory, without a copy where that is possible."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def header(tensors: Mapping[str, Tensor], document: Any) -> bytes:
    """The header's bytes, length word included; offsets follow the order of `tensors`."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
            raise StateNotSavable(
                f"state entry {name}: expected a dense tensor of a plain dtype, found {tensor.layout} {tensor.dtype}; "
                "convert it in the object's state_dict"
            )
    ties = _ties(tensors)
    entries: dict[str, Any] = {"__metadata__": {DOCUMENT: json.dumps(document), TIES: json.dumps(ties)}}
    offset = 0
    for name, tensor in tensors.items():
        if name in ties:
            continue
        size = tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + LENGTH.size) % PAGE)
    return LENGTH.pack(len(text)) + text


def write(tensors: Mapping[str, Tensor], document: Any, sink: Callable[[memoryview], None]) -> int:
    """Hand the image to `sink` piece by piece; returns its size in bytes."""
    head = header(tensors, document)
    sink(memoryview(head))
    size = len(head)
    ties = _ties(tensors)
    for tensor in (tensor for name, tensor in tensors.items() if name not in ties):
        data = tensor_bytes(tensor)
        if data.numel():
            sink(data.numpy().data)
            size += data.numel()
    return size


def read(image: bytes | bytearray | memoryview) -> tuple[dict[str, Tensor], Any]:
    """Tensors (host memory, own storage each) and document of an image. Raises CheckpointDamaged when it is none."""
    view = memoryview(image)
    try:
        (length,) = LENGTH.unpack_from(view)
        entries = json.loads(bytes(view[LENGTH.size : LENGTH.size + length]))
        metadata = entries.pop("__metadata__")
        document = json.loads(metadata[DOCUMENT])
        data = view[LENGTH.size + length :]
        tensors = {name: _tensor(entry, data) for name, entry in entries.items()}
        tensors |= {name: tensors[first].clone() for name, first in json.loads(metadata[TIES]).items()}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RuntimeError) as error:
        raise CheckpointDamaged(f"the payload is not a training state: {error}") from error
    return tensors, document


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


def _tensor(entry: dict[str, Any], data: memoryview) -> Tensor:
    dtype, shape = NAMES[entry["dtype"]], entry["shape"]
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(data):
        raise ValueError(f"offsets {start}..{end} lie outside {len(data)} bytes of data")
    if start == end:
        if 0 not in shape:
            raise ValueError(f"an entry of shape {shape} has no bytes")
        return torch.empty(shape, dtype=dtype)
    # bytearray: torch wants memory of its own that may be written to.
    return torch.frombuffer(bytearray(data[start:end]), dtype=dtype).reshape(shape)
