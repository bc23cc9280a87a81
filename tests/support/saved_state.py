"""A state as a checkpoint keeps it, and an object that holds one."""

from collections.abc import Callable
from typing import Any

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
