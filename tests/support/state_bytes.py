"""A flattened state as a checkpoint keeps it."""

from elastic.snapshot import image
from elastic.train.state.flat import FlatState


def through_bytes(parts: FlatState) -> FlatState:
    """The state that is read from the image of this one."""
    layout = image.layout(parts.tensors, parts.to_json())
    body = bytearray(layout.size_bytes)
    image.copy_into(layout, memoryview(body))
    return FlatState.read(*image.read(body))
