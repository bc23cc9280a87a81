"""What a function returns for a block is taken apart into vectors that can be added, and back.

A value is a number or a tensor, or a dict, list or tuple of values. Floats of any width are added
in float64, complex numbers as pairs of those, whole numbers and truth values exactly in int64.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic.errors import UsageError

# JSON that says how a value is made of its parts: {"dict": [[key, form], ...]}, {"list": [form,
# ...]}, {"tuple": ...}, {"float": shape}, {"complex": shape} or {"int": shape}; a number has the
# shape None.
Form = dict[str, Any]
DTYPES = torch.float64, torch.int64


def take_apart(value: Any, device: torch.device) -> tuple[Form, dict[torch.dtype, Tensor]]:
    """The form of a value, and its numbers: one vector of new memory for each dtype that occurs.

    Raises UsageError for a value that cannot be added.
    """
    parts: dict[torch.dtype, list[Tensor]] = {dtype: [] for dtype in DTYPES}
    form = _take_apart(value, "", parts)
    return form, {
        dtype: torch.cat([part.to(device).reshape(-1) for part in of_dtype])
        for dtype, of_dtype in parts.items()
        if of_dtype
    }


def sizes_of(form: Form) -> dict[torch.dtype, list[int]]:
    """How many numbers of each dtype each part has, in order."""
    sizes: dict[torch.dtype, list[int]] = {}
    for kind, shape in _parts_of(form):
        count = int(np.prod(shape or [])) * (2 if kind == "complex" else 1)
        sizes.setdefault(_dtype_of(kind), []).append(count)
    return sizes


def put_together(form: Form, totals: Mapping[torch.dtype, tuple[Tensor, ...]]) -> Any:
    """The value that these parts make; a tensor without dimensions comes back as a number."""
    return _put_together(form, {dtype: iter(of_dtype) for dtype, of_dtype in totals.items()})


def _take_apart(value: Any, path: str, parts: dict[torch.dtype, list[Tensor]]) -> Form:
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _take_apart(each, f"{path}[{key!r}]", parts)] for key, each in value.items()]}
    if type(value) in (list, tuple):
        forms = [_take_apart(each, f"{path}[{i}]", parts) for i, each in enumerate(value)]
        return {type(value).__name__: forms}
    if isinstance(value, float):
        value = torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, complex):
        value = torch.tensor(value, dtype=torch.complex128)
    elif isinstance(value, int | np.generic | np.ndarray):
        value = torch.as_tensor(value)
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        raise UsageError(
            f"run.evaluate: expected the function to return a number, a dense tensor, or a dict or tuple of them, found "
            f"{type(value).__name__}{f' in result{path}' if path else ''}"
        )
    kind = "complex" if value.is_complex() else "float" if value.is_floating_point() else "int"
    wide = value.detach().to(torch.complex128 if kind == "complex" else _dtype_of(kind))
    parts[_dtype_of(kind)].append(torch.view_as_real(wide.resolve_conj()) if kind == "complex" else wide)
    return {kind: list(value.shape) or None}


def _put_together(form: Form, totals: dict[torch.dtype, Iterator[Tensor]]) -> Any:
    ((kind, content),) = form.items()
    if kind == "dict":
        return {key: _put_together(each, totals) for key, each in content}
    if kind in ("list", "tuple"):
        values = [_put_together(each, totals) for each in content]
        return tuple(values) if kind == "tuple" else values
    total = next(totals[_dtype_of(kind)])
    if kind == "complex":
        total = torch.view_as_complex(total.view(-1, 2))
    return total[0].item() if content is None else total.view(content).clone()


def _parts_of(form: Form) -> Iterator[tuple[str, list[int] | None]]:
    ((kind, content),) = form.items()
    if kind in ("dict", "list", "tuple"):
        for each in content:
            yield from _parts_of(each[1] if kind == "dict" else each)
    else:
        yield kind, content


def _dtype_of(kind: str) -> torch.dtype:
    return torch.int64 if kind == "int" else torch.float64
