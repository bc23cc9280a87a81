"""Whether two loads of a batch gave the same samples, by a hash of its tensors, numbers and texts.

Values of other types count by their type alone: two equal ones may not look alike. All NaNs count
as one, since which of them arithmetic gives may depend on where its operands lie.
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
    if isinstance(value, Tensor):
        found.update(f"{value.dtype} {value.layout} ".encode())
        _add_tensor(found, value.detach())
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:  # its bytes are addresses
        found.update(f"{list(value.shape)} ".encode())
        _add(found, value.tolist())
    elif isinstance(value, np.ndarray):
        found.update(f"{value.dtype} {list(value.shape)} ".encode())
        found.update(_with_one_nan(value).tobytes())
    elif isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        found.update(repr(value).encode())
    elif isinstance(value, list | tuple):
        for each in value:
            _add(found, each)
    elif isinstance(value, dict):
        for name, each in value.items():
            _add(found, name)
            _add(found, each)


def _add_tensor(found: "hashlib._Hash", tensor: Tensor) -> None:
    if tensor.is_nested:
        _add(found, tensor.unbind())
    elif tensor.layout is torch.sparse_coo:
        _add(found, [list(tensor.shape), tensor._indices(), tensor._values()])  # noqa: SLF001
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        _add(found, [list(tensor.shape), tensor.crow_indices(), tensor.col_indices(), tensor.values()])
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        _add(found, [list(tensor.shape), tensor.ccol_indices(), tensor.row_indices(), tensor.values()])
    elif tensor.layout is torch.strided and not tensor.is_meta:
        found.update(f"{list(tensor.shape)} ".encode())
        plain = real_numbers(tensor.cpu()).contiguous()
        found.update(plain.reshape(-1).view(torch.uint8).numpy().data)


def real_numbers(tensor: Tensor) -> Tensor:
    """A dense tensor's numbers, two for a complex one, with one NaN for all."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    # A sum costs a third of a search for NaNs, and is one if there are any. Types of one byte have
    # neither.
    if real.is_floating_point() and real.itemsize > 1 and real.sum().isnan():
        return real.masked_fill(real.isnan(), torch.nan)
    return real


def _with_one_nan(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype.kind not in "fc":
        return array
    real = np.ascontiguousarray(array).view(array.real.dtype)
    return np.where(np.isnan(real), real.dtype.type(np.nan), real)
