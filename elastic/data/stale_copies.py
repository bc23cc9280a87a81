"""A loop that changes its dataset is refused where data-loading processes have copies of it.

The processes copy the dataset when they begin, and load ahead: a strength or an epoch that the loop
sets later would have no effect in them, and a process that resumes would copy the new one. Each
step therefore compares the attributes with what they were when the processes began: those of the
dataset and of its classes, of datasets in it, and of their transforms, by identity, numbers and
words by value, containers also by length, and tensors by autograd's count of changes.

It does not see changes inside arrays, nor in other objects.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import ReferenceType

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from elastic.errors import UsageError

_DEPTH = 4
_FEW = 64  # datasets or transforms in a list
_PLAIN = bool, int, float, str, type(None)
_DATA = *_PLAIN, list, tuple, dict, set, Tensor, np.ndarray
_OF_CLASS = *_PLAIN, list, dict, set, Tensor, np.ndarray
_NOTHING = object()
CONTAINERS = list, dict, set, deque


class Attribute(NamedTuple):
    value: Any
    version: int  # see version_of


Attributes = dict[str, Attribute]  # by name, such as `dataset.transform.p`


def attributes_of(dataset: Any) -> Attributes:
    return dict(_attributes(dataset, "dataset", 0))


def changed(before: Attributes, now: Attributes) -> list[str]:
    """The names of what is not as it was, but for files and the like that were opened."""
    return [name for name in before | now if _is_other(before.get(name), now.get(name))]


def check(before: Attributes, dataset: Any, of_loading: set[str], step: int, workers: int) -> None:
    """Raises UsageError if the loop changed an attribute.

    of_loading: the names of those that loading changes.
    """
    now = attributes_of(dataset)
    names = [name for name in changed(before, now) if name not in of_loading]
    if names:
        name = names[0]
        was, found = (_described(values.get(name)) for values in (before, now))
        raise UsageError(
            f"step {step}: the loop changed {name}, which was {was} and is {found}, and the data-loading processes (workers={workers}) do not see it: "
            "they have copies of the dataset from the beginning of the loop. Use workers=0; or apply it to the batch, in the function given to "
            "step.mean_loss or step.sum, from step.number or batch.epoch; or choose the samples by run.data(order=...)"
        )


def _attributes(thing: Any, name: str, depth: int) -> Iterator[tuple[str, Attribute]]:
    held = getattr(thing, "__dict__", None)
    if type(held) is not dict or depth > _DEPTH:
        return
    # What its classes have holds for it, such as a list that all its samples share.
    of_class = {
        key: value
        for kind in reversed(type(thing).__mro__[:-1])
        for key, value in vars(kind).items()
        if isinstance(value, _OF_CLASS)
    }
    for attribute, value in {**of_class, **held}.items():
        if attribute.startswith("__"):
            continue
        place = f"{name}.{attribute}"
        yield place, Attribute(value, version_of(value))
        parts = value if isinstance(value, list | tuple) and len(value) <= _FEW else [value]
        for number, part in enumerate(parts):
            if isinstance(part, Dataset) or ("transform" in attribute and not isinstance(part, _DATA)):
                yield from _attributes(part, place if part is value else f"{place}[{number}]", depth + 1)


def version_of(value: Any) -> int:
    """Autograd's count of changes to a tensor that processes do not share; a container's length."""
    if isinstance(value, CONTAINERS):
        return len(value)
    if not isinstance(value, Tensor) or value.is_inference():
        return 0
    is_shared = value.is_shared()  # type: ignore[no-untyped-call]
    return 0 if is_shared else value._version  # noqa: SLF001 - autograd's count of changes


def _is_other(before: Attribute | None, now: Attribute | None) -> bool:
    one, other = (_NOTHING if each is None else each.value for each in (before, now))
    has_other_version = before is not None and now is not None and before.version != now.version
    if one is other:
        return has_other_version
    if isinstance(one, _PLAIN) and type(one) is type(other):  # also the address of a container
        return has_other_version or repr(one) != repr(other)
    if isinstance(other, ReferenceType):
        other = other()
    is_opened = (one is None or one is _NOTHING) and not isinstance(other, _DATA) and not callable(other)
    return not is_opened


def _described(value: Attribute | None) -> str:
    if value is None:
        return "nothing"
    is_plain = isinstance(value.value, _PLAIN)
    return f"{value.value!r:.40}" if is_plain else f"a {type(value.value).__name__}"
