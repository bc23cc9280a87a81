"""Data-loading processes have what they read of the run as it was when they began.

Samples that `elastic.Values` choose, a model that rates them, the number of the step: in a process
that loads samples these never change, and one that begins after a restart has others. Each look
therefore compares what code that loads samples reads of them.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from elastic.train.object_marks import leaves
from elastic.train.state import State
from elastic.train.words import plain_text

_STEP = "elastic.train.step"


def marks_of(state: State, read: Mapping[str, Any]) -> dict[str, object]:
    """Of the objects of the State, and of steps, among what is read, by its names there."""
    found: dict[str, object] = {}
    for name, value in read.items():
        if any(value is each for each in state.objects.values()):
            found[name] = _mark(value)
        elif type(value).__module__ == _STEP:
            found[name] = value.number
    return found


def changed(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The name of the first that is another one than before; empty for none."""
    return next((name for name, mark in now.items() if before.get(name, mark) != mark), "")


def _mark(thing: Any) -> object:
    if isinstance(thing, nn.Module):
        return [each._version for each in (*thing.parameters(), *thing.buffers())]  # noqa: SLF001
    values = [each for _, each in leaves(thing.state_dict())]
    return [each._version if isinstance(each, Tensor) else plain_text(each) for each in values]  # noqa: SLF001
