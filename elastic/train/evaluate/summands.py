"""What a function returns for a block is taken apart into vectors that can be added, and back.

A value is a number or a dense tensor, or a dict, list or tuple of values. Floats of any width are
added in float64, whole numbers and truth values exactly in int64, where they wrap as torch's own
sums do.
"""

from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from elastic.errors import UsageError

DTYPES = torch.float64, torch.int64


class SummandForm(NamedTuple):
    """How a value is made of its numbers and tensors. parts: dtype and shape of each in 64 bits."""

    tree: TreeSpec
    parts: tuple[tuple[torch.dtype, torch.Size], ...]

    def __str__(self) -> str:
        parts = ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in self.parts)
        return f"{self.tree} of ({parts})"

    def sizes(self, dtype: torch.dtype) -> list[int]:
        """How many numbers each part of this dtype has, in order."""
        return [prod(shape) for each, shape in self.parts if each is dtype]


def take_apart(value: Any, device: torch.device) -> tuple[SummandForm, dict[torch.dtype, Tensor]]:
    """The form of a value, and its numbers: one vector of new memory for each dtype that occurs.

    Raises UsageError for a value that cannot be added.
    """
    leaves, tree = tree_flatten(value)
    parts = [_widened(leaf) for leaf in leaves]
    vectors = {
        dtype: torch.cat([part.to(device).reshape(-1) for part in parts if part.dtype is dtype])
        for dtype in DTYPES
        if any(part.dtype is dtype for part in parts)
    }
    return SummandForm(tree, tuple((part.dtype, part.shape) for part in parts)), vectors


def put_together(form: SummandForm, totals: Mapping[torch.dtype, Tensor]) -> Any:
    """The value that these vectors make; a tensor without dimensions comes back as a number."""
    rest = {dtype: iter(torch.split(total, form.sizes(dtype))) for dtype, total in totals.items()}
    parts = [next(rest[dtype]).view(shape) for dtype, shape in form.parts]
    return tree_unflatten([part.clone() if part.dim() else part.item() for part in parts], form.tree)


def _widened(leaf: Any) -> Tensor:
    """float64 or int64. Raises UsageError for anything but a number or a dense tensor."""
    value = leaf
    if isinstance(leaf, float):
        value = torch.tensor(leaf, dtype=torch.float64)
    elif isinstance(leaf, int | np.generic | np.ndarray):
        with suppress(TypeError, OverflowError, RuntimeError, ValueError):  # it stays what it is
            value = torch.as_tensor(leaf)
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    if not is_dense or value.is_quantized or value.is_meta or value.is_complex():
        raise UsageError(
            "run.evaluate: expected the function to return a number, a dense tensor, or a dict or tuple of them, found a "
            f"{type(leaf).__name__} in it; return real sums over the samples of the batch"
        )
    wide: Tensor = value.detach().to(torch.float64 if value.is_floating_point() else torch.int64)
    return wide
