"""A state as a checkpoint keeps it, an object that holds one, and any tensor."""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from elastic.snapshot import image
from elastic.train.state.flat import FlatState
from elastic.train.state.state import State


class Holder:
    """An object whose state is whatever it is given. change: of what it loads."""

    def __init__(self, value: Any = None, change: Callable[[Any], Any] = lambda value: value) -> None:
        self.value, self.change = value, change

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state_dict: Any) -> None:
        self.value = self.change(state_dict)


def saved(state: State) -> FlatState:
    """An image, whose tensors are read where they lie, as a restore does."""
    flat = state.flatten()
    laid_out = image.layout(flat.tensors, flat.to_json())
    body = bytearray(laid_out.size_bytes)
    image.copy_into(laid_out, body)
    return FlatState.read(*image.read(body))


@st.composite
def any_tensors(draw: Any, most: int = 4) -> torch.Tensor:
    """Any bits of any dtype that an image keeps; 0 to 3 dimensions of at most this size."""
    dtype = draw(st.sampled_from(list(image.DTYPES)))
    shape = draw(st.lists(st.integers(0, most), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
