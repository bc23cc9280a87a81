"""Two states, or two images, with the same checksum are the same, unless somebody made them differ on purpose.

Sums of 64-bit words, which an optimizer step does not notice where sha256 would cost a tenth of it: one pass at the speed of memory. Each of 64 stretches is summed by
itself, so that parts which changed places are noticed. What is stored for good has a sha256 instead.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

STRETCHES = 64
WORD_BYTES = 8
SMALL_BYTES = 4096


def of_image(image: Tensor) -> str:
    """image: uint8 [n], host memory. 64 hexadecimal digits."""
    return hashlib.sha256(_sums(image)).hexdigest()


def of_state(tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """(checksum of the whole state, checksum of each entry), in hexadecimal; the same on every device."""
    entries = {}
    for name, tensor in tensors.items():
        head = f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode()
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        entries[name] = hashlib.sha256(head + _sums(flat)).hexdigest()
    for name, value in document.items():
        entries[f"{name} (values)"] = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    whole = hashlib.sha256("".join(f"{k} {v}\n" for k, v in sorted(entries.items())).encode()).hexdigest()
    return whole, entries


def _sums(flat: Tensor) -> bytes:
    """What stands for uint8 [n]: the bytes themselves where there are few, else the sums of its stretches and the few bytes after them."""
    if flat.numel() <= SMALL_BYTES:
        return flat.cpu().numpy().tobytes()
    if flat.data_ptr() % WORD_BYTES or flat.storage_offset() % WORD_BYTES:
        flat = flat.clone()  # words must lie on their boundaries
    each = flat.numel() // (STRETCHES * WORD_BYTES)
    cut = each * STRETCHES * WORD_BYTES
    sums = flat[:cut].view(torch.int64).view(STRETCHES, each).sum(1)  # wraps around, the same everywhere
    return sums.cpu().numpy().tobytes() + flat[cut:].cpu().numpy().tobytes()
