"""What a function returns for a block is taken apart into vectors that can be added, and back.

A value is a number or a tensor, or a dict, list or tuple of values. Floats of any width are added
in float64, complex numbers as pairs of those, whole numbers and truth values exactly in int64
(whole_numbers.py refuses those whose sum might not fit).
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic.errors import UsageError
from elastic.train.evaluate import whole_numbers

# JSON that says how a value is made of its parts: {"dict": [[key, form], ...]}, {"list": [form,
# ...]}, {"tuple": ...}, {"float": shape}, {"complex": shape} or {"int": shape}; a number has the
# shape None.
SummandForm = dict[str, Any]
DTYPES = torch.float64, torch.int64
MOST_LEVELS = 50  # of dicts, lists and tuples in each other
_CALL = "run.evaluate"


def take_apart(value: Any, device: torch.device) -> tuple[SummandForm, dict[torch.dtype, Tensor]]:
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


def sizes_of(form: SummandForm) -> dict[torch.dtype, list[int]]:
    """How many numbers of each dtype each part has, in order."""
    sizes: dict[torch.dtype, list[int]] = {}
    for _, kind, shape in _parts_of(form):
        sizes.setdefault(_dtype_of(kind), []).append(prod(shape or []) * (2 if kind == "complex" else 1))
    return sizes


def places_of_integers(form: SummandForm) -> list[tuple[str, int]]:
    """The path of each part of whole numbers, and how many these are, in order."""
    return [
        (f"result{path}" if path else "", prod(shape or []))
        for path, kind, shape in _parts_of(form)
        if kind == "int"
    ]


def put_together(form: SummandForm, totals: Mapping[torch.dtype, tuple[Tensor, ...]]) -> Any:
    """The value that these parts make; a tensor without dimensions comes back as a number."""
    return _put_together(form, {dtype: iter(of_dtype) for dtype, of_dtype in totals.items()})


def _take_apart(value: Any, path: str, parts: dict[torch.dtype, list[Tensor]], level: int = 0) -> SummandForm:
    if level > MOST_LEVELS:
        raise UsageError(
            f"{_CALL}: expected at most {MOST_LEVELS} dicts, lists and tuples in each other, found more; does one contain itself?"
        )
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        items = [(key, f"{path}[{key!r}]", each) for key, each in value.items()]
        return {"dict": [[key, _take_apart(each, where, parts, level + 1)] for key, where, each in items]}
    if type(value) in (list, tuple):
        forms = [_take_apart(each, f"{path}[{i}]", parts, level + 1) for i, each in enumerate(value)]
        return {type(value).__name__: forms}
    tensor = _as_tensor(value, path)
    kind = "complex" if tensor.is_complex() else "float" if tensor.is_floating_point() else "int"
    if kind == "int":
        wide = whole_numbers.widened(tensor, _CALL, _place(path))
    else:
        wide = tensor.detach().to(torch.complex128 if kind == "complex" else torch.float64)
    parts[_dtype_of(kind)].append(torch.view_as_real(wide.resolve_conj()) if kind == "complex" else wide)
    return {kind: list(tensor.shape) or None}


def _as_tensor(value: Any, path: str) -> Tensor:
    """Raises UsageError for what is no number and no dense tensor."""
    found = type(value).__name__
    if isinstance(value, int) and abs(value) > whole_numbers.MOST:
        raise whole_numbers.too_large(_CALL, value, whole_numbers.MOST, _place(path))
    if isinstance(value, float | complex):
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.complex128)
    elif isinstance(value, int | np.generic | np.ndarray):
        found = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else found
        with suppress(TypeError):  # of what torch has no type for, it stays what it is
            value = torch.as_tensor(value)
    if (
        not isinstance(value, Tensor)
        or value.layout is not torch.strided
        or value.is_quantized
        or value.is_meta
    ):
        raise UsageError(
            f"{_CALL}: expected the function to return a number, a dense tensor, or a dict or tuple of them, found {found}{_place(path)}"
        )
    return value


def _place(path: str) -> str:
    return f" in result{path}" if path else ""


def _put_together(form: SummandForm, totals: dict[torch.dtype, Iterator[Tensor]]) -> Any:
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


def _parts_of(form: SummandForm, path: str = "") -> Iterator[tuple[str, str, list[int] | None]]:
    """(path, kind, shape) of each number or tensor."""
    ((kind, content),) = form.items()
    if kind in ("dict", "list", "tuple"):
        for i, each in enumerate(content):
            key, part = each if kind == "dict" else (i, each)
            yield from _parts_of(part, f"{path}[{key!r}]")
    else:
        yield path, kind, content


def _dtype_of(kind: str) -> torch.dtype:
    return torch.int64 if kind == "int" else torch.float64
