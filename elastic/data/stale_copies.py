"""A loop that changes its dataset is refused where data-loading processes have copies of it.

The processes copy the dataset when they begin, and load ahead: a strength or an epoch that the loop
sets later would have no effect in them, and a process that resumes would copy the new one. Each
step therefore compares the attributes with what they were when the processes began: those of the
dataset and of its classes, of datasets in it, and of their transforms, by identity, numbers and
words by value, containers also by length, and tensors by autograd's count of changes.

The same is asked of a `collate` that is an object, or a function with attributes, and of what both
hold: objects of the recipe's own classes, with methods, that no State saves. It does not see
changes inside arrays, nor in objects of libraries.
"""

from collections import deque
from collections.abc import Iterator
from enum import Enum
from functools import cache, partial
from multiprocessing.sharedctypes import SynchronizedBase
from types import FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import ReferenceType

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from elastic.data.attributes import has_space, space_of
from elastic.data.own_files import is_own_class
from elastic.errors import UsageError

_DEPTH = 4
_FEW = 64  # datasets or transforms in a list
_PLAIN = bool, int, float, str, type(None)
_DATA = *_PLAIN, Enum, list, tuple, dict, set, Tensor, np.ndarray
SHARED = SynchronizedBase  # a value that multiprocessing keeps in memory of several processes
_OF_CLASS = *_PLAIN, Enum, list, dict, set, Tensor, np.ndarray, SHARED
_OF_RECORDS = {"__init__", "__post_init__", "__repr__", "__eq__", "__hash__", "__replace__"} | {
    "__getstate__",  # of a dataclass with slots
    "__setstate__",
}
_NOTHING = object()
CONTAINERS = list, dict, set, deque


class Attribute(NamedTuple):
    value: Any
    version: int  # see version_of


Attributes = dict[str, Attribute]  # by name, such as `dataset.transform.p`


def roots_of(dataset: Any, collate: Any) -> dict[str, Any]:
    """What is asked for attributes. Those that a method or a partial holds belong to others."""
    is_holder = collate is not None and not isinstance(collate, type | MethodType | partial)
    return {"dataset": dataset, "collate": collate} if is_holder else {"dataset": dataset}


def attributes_of(dataset: Any, collate: Any = None) -> Attributes:
    found: Attributes = {}
    for name, thing in roots_of(dataset, collate).items():
        found.update(_attributes(thing, name, 0))
    return found


def attributes_of_method(collate: Any) -> Attributes:
    """What a method reads of its object, which is the loop's as well, by name of its class."""
    if not isinstance(collate, MethodType):
        return {}
    kind, held = type(collate.__self__), space_of(collate.__self__)
    waiting: list[Any] = [collate.__func__]
    names = set[str]()
    while waiting:
        made = waiting.pop()
        new = set(getattr(getattr(made, "__code__", None), "co_names", ())) - names
        names |= new
        waiting += [getattr(kind, name, None) for name in sorted(new)]
    return {
        f"{kind.__name__}.{name}": Attribute(held[name], version_of(held[name]))
        for name in sorted(names & held.keys())
        if isinstance(held[name], _DATA)
    }


def changed(before: Attributes, now: Attributes) -> list[str]:
    """The names of what is not as it was, but for files and the like that were opened."""
    return [name for name in before | now if _is_other(before.get(name), now.get(name))]


def check(before: Attributes, now: Attributes, of_loading: set[str], step: int, workers: int) -> None:
    """Raises UsageError if the loop changed an attribute.

    of_loading: the names of those that loading changes.
    """
    names = [name for name in changed(before, now) if name not in of_loading]
    if names:
        name = names[0]
        was, found = (_described(values.get(name)) for values in (before, now))
        raise UsageError(refusal(f"step {step}", f"{name}, which was {was} and is {found},", workers))


def refusal(when: str, what: str, workers: int) -> str:
    return (
        f"{when}: the loop changed {what} and the data-loading processes (workers={workers}) do not see it: "
        "they have copies of the dataset from the beginning of the loop, and of all that it and collate read. Use workers=0; or apply it to the batch, in the function given to "
        "step.mean_loss or step.sum, from step.number or batch.epoch; or choose the samples by run.data(order=...)"
    )


def _attributes(thing: Any, name: str, depth: int) -> Iterator[tuple[str, Attribute]]:
    if not has_space(thing) or depth > _DEPTH:
        return
    # What its classes have holds for it, such as a list that all its samples share.
    of_class = {
        key: value
        for kind in reversed(type(thing).__mro__[:-1])
        for key, value in vars(kind).items()
        if isinstance(value, _OF_CLASS)
    }
    for attribute, value in {**of_class, **space_of(thing)}.items():
        if attribute.startswith("__"):
            continue
        place = f"{name}.{attribute}"
        yield place, Attribute(value, version_of(value))
        parts = value if isinstance(value, list | tuple) and len(value) <= _FEW else [value]
        for number, part in enumerate(parts):
            if _is_entered(part, attribute, is_alone=part is value):
                yield from _attributes(part, place if part is value else f"{place}[{number}]", depth + 1)


def _is_entered(part: Any, attribute: str, *, is_alone: bool) -> bool:
    """Whether the attributes of what an attribute holds count as well.

    Records without methods are contents (train/dataset_contents.py). An object with a state_dict is
    the State's business.
    """
    if isinstance(part, Dataset):
        return True
    if isinstance(part, _DATA):
        return False
    return "transform" in attribute or (is_of_own_class(part) and (is_alone or callable(part)))


def is_of_own_class(part: Any) -> bool:
    """Of a class of the recipe's own, with methods, which no State saves."""
    kind: Any = type(part)
    return has_space(part) and not isinstance(part, type) and _is_own_kind(kind)


@cache
def _is_own_kind(kind: Any) -> bool:
    return is_own_class(kind) and not is_record_class(kind) and not hasattr(kind, "state_dict")


@cache
def is_record_class(kind: Any) -> bool:
    """Without bases, and without methods that could set attributes."""
    functions = {name for name, made in vars(kind).items() if isinstance(made, FunctionType)}
    return kind.__mro__[1:] == (object,) and functions <= _OF_RECORDS


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
