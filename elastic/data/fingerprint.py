"""Whether two loads of a batch gave the same samples, by a hash of its tensors, numbers and texts.

Values of other types do not count: two equal ones may not look alike.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor


def fingerprint(data: Any) -> str:
    """Of nested tuples, lists and dicts of values, in their order."""
    found = hashlib.sha256()
    _add(found, data)
    return found.hexdigest()[:16]


def _add(found: "hashlib._Hash", value: Any) -> None:
    found.update(f"{type(value).__name__} ".encode())
    if isinstance(value, Tensor) and value.layout is torch.strided:
        found.update(f"{value.dtype} {list(value.shape)} ".encode())
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        found.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        found.update(f"{value.dtype} {list(value.shape)} ".encode())
        found.update(value.tobytes())
    elif isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        found.update(repr(value).encode())
    elif isinstance(value, list | tuple):
        for each in value:
            _add(found, each)
    elif isinstance(value, dict):
        for name, each in value.items():
            _add(found, name)
            _add(found, each)
