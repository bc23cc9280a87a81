"""Whether a step's body has changed the state, as far as that can be told in a few microseconds.

Looked at are how often trained parameters were written to, and what the Values hold. It does not
see writes through `.data`, what other objects of the state hold, and items of a list or dict beyond
the first thousand.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from elastic.train.values import Values

MAX_ITEMS = 1000
MAX_BYTES = 4096  # of an array whose contents are compared


def mark_of(parameters: Sequence[Tensor], objects: Iterable[object]) -> list[Any]:
    """Equal to an earlier mark of these where nothing was changed. objects: those of the state."""
    values = [_mark(vars(thing)) for thing in objects if isinstance(thing, Values)]
    return [[parameter._version for parameter in parameters], values]  # noqa: SLF001 - autograd's count of changes


def _mark(value: Any) -> Any:
    match value:
        case Tensor():
            return id(value), value._version  # noqa: SLF001
        case np.ndarray():
            return id(value), value.tobytes() if value.nbytes <= MAX_BYTES else b""
        case list() | tuple():
            return [id(value), len(value), *map(_mark, value[:MAX_ITEMS])]
        case dict():
            return [
                id(value),
                len(value),
                *((key, _mark(item)) for key, item in islice(value.items(), MAX_ITEMS)),
            ]
        case _:
            return value
