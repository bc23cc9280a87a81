"""A state as a checkpoint keeps it."""

from elastic.snapshot import image
from elastic.train.state.flat import FlatState
from elastic.train.state.state import State


def saved(state: State) -> FlatState:
    """An image, whose tensors are read where they lie, as a restore does."""
    flat = state.flatten()
    laid_out = image.layout(flat.tensors, flat.to_json())
    body = bytearray(laid_out.size_bytes)
    image.copy_into(laid_out, body)
    return FlatState.read(*image.read(body))
