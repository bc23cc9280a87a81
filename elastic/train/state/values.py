"""What a recipe's loop changes survives as a value: an attribute, which comes back as it was.

A variable of the loop (a best metric, a count of bad epochs) begins again in every generation,
because every worker runs the script from its top. As a value it is part of the state.

It does not make ranks agree: a value that is computed from a rank's own data differs between ranks,
and the comparison of states finds that.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import islice
from pathlib import PurePath
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from elastic.errors import UsageError
from elastic.snapshot.image import DTYPES
from elastic.train.misuse import public

_KINDS = (bool, int, float, str, type(None))
_MOST_LEVELS = 50
ALL_OF_FIRST, LAST_ITEMS = 16, 8  # steps; items of a list or a dict in the others
_EXPECTED = "expected numbers, strings, tensors, arrays of numbers, or lists, tuples and dicts of them"
_ELSE = "Anything else belongs into an object of its own with state_dict and load_state_dict"
_ARRAY = "ndarray"  # the only key of the dict that stands for an array in a state


# What to keep in the place of a value of this kind, which is no more than its number or its items.
_INSTEAD: tuple[tuple[Any, str], ...] = (
    (Enum, "x.value"),
    (set | frozenset, "sorted(x)"),
    (PurePath, "str(x)"),
    (datetime, "x.isoformat()"),
    (timedelta, "x.total_seconds()"),
    (complex, "(x.real, x.imag)"),
    (bytes | bytearray | deque | range, "list(x)"),
    (Decimal | Fraction, "str(x)"),
    (int | np.unsignedinteger, "int(x)"),
    (str, "str(x)"),
    (tuple, "tuple(x)"),
    (dict, "dict(x)"),
    (torch.dtype | torch.device, "str(x)"),
)


class UnknownValue(UsageError, AttributeError):  # noqa: N818
    """A name that the recipe did not give when it made its Values: a slip of the pen, perhaps."""


# That each of them was given; a copy of Values has none here.
_names: "WeakKeyDictionary[Values, frozenset[str]]" = WeakKeyDictionary()


class Values:
    """Numbers, strings, tensors, arrays, and lists and dicts of them, by name.

        values = elastic.Values(best=math.inf, recent=[], center=torch.zeros(64))
        state = elastic.State(model=model, values=values)
        values.best = min(values.best, loss)
        values.recent.append(loss)
        values.center = 0.9 * values.center + 0.1 * center

    The names are fixed here. A value is a copy, and no part of a graph; it has the type and dtype
    that it was given with, but for a tensor without dimensions, such as a loss, which becomes its
    number; in lists and dicts, whole ones stay tensors (`dict(model.state_dict())`). Raises
    UsageError for values of other types, all of them at once, and for a name that no value can
    have, and UnknownValue (an AttributeError too) where a name is read or set that was not given
    here.
    """

    @public("elastic.Values")
    def __init__(self, **values: Any) -> None:
        for name in values:
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"Values({name}=...): expected another name, this one is taken")
        vars(self).update(_kept_all(values))
        _names[self] = frozenset(values)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self):
            self._refuse(name)
        vars(self).update(_kept_all({name: value}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and pickle look for
            raise AttributeError(name)
        self._refuse(name)

    def __delattr__(self, name: str) -> None:
        raise UsageError(f"expected the value {name!r} to stay; set it to None where there is none")

    def __repr__(self) -> str:
        return f"Values({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        """Raises UsageError for what cannot be kept, and for a list or dict that has two places."""
        _check(self, most=None)
        return {name: _encoded(value) for name, value in vars(self).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ValueError for other names than these."""
        if state_dict.keys() != vars(self).keys():
            raise ValueError(
                f"expected the values {sorted(vars(self))}, found {sorted(state_dict)}; "
                "Values(...) must have the same names as when the run began"
            )
        for name, value in state_dict.items():
            vars(self)[name] = _loaded(vars(self)[name], _decoded(value))

    def _refuse(self, name: str) -> None:
        raise UnknownValue(
            f"expected one of the values {sorted(vars(self))}, found {name!r}; "
            f"name it where the Values are made: Values({name}=...)"
        )


def check_all(objects: Iterable[object], steps: int) -> None:
    """What a step's body has put into lists and dicts of Values is of types that a state can keep.

    objects: those of the state. steps: done by this process before this one. All items are looked
    at in the first steps and in those that are a power of two, in others the last ones of each list
    and dict, where an append puts them. Raises UsageError.
    """
    is_whole = steps <= ALL_OF_FIRST or not steps & (steps - 1)
    for thing in objects:
        if isinstance(thing, Values):
            _check(thing, most=None if is_whole else LAST_ITEMS)


def _check(values: Values, most: int | None) -> None:
    if other := vars(values).keys() ^ _names.get(values, vars(values).keys()):
        raise UsageError(
            f"Values: expected the names that were given at first, found that {min(other, key=str)!r} came or went in vars(values), which no load can give back; "
            "name all where the Values are made, and for names that come later keep a dict, Values(others={})"
        )
    places: dict[int, str] = {}
    for name, value in vars(values).items():
        _check_item(value, name, places, most)


def _kept_all(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the values. Raises UsageError with all of those that a state cannot keep."""
    kept, refused = dict[str, Any](), list[str]()
    for name, value in values.items():
        try:
            kept[name] = _kept(value)
        except _Unkept as problem:
            refused.append(f"{name!r}, found {problem}")
    if refused:
        raise UsageError(f"Values: {_EXPECTED} for {'; for '.join(refused)}. {_ELSE}")
    return kept


class _Unkept(Exception):  # noqa: N818 - never leaves this module
    """What a value is, and what to keep in its place, if that is known."""


def _kept(value: Any, level: int = 0) -> Any:
    """A copy of the value. Raises _Unkept for one that a state cannot keep."""
    if level > _MOST_LEVELS:
        raise _Unkept(
            f"more than {_MOST_LEVELS} lists, tuples and dicts in each other (does one contain itself?)"
        )
    is_number = isinstance(value, Tensor) and not value.dim() and not value.is_complex()
    # Inside a dict it may be BatchNorm's count of batches, which a module takes as a tensor alone.
    if is_number and (not level or value.is_floating_point()):
        value = value.item()
    if type(value) in _KINDS:
        return value
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES:
            raise _Unkept(_of_unknown_dtype(value))
        return value.detach().clone()
    if (type(value) is np.ndarray or isinstance(value, np.generic)) and _is_number(value.dtype):
        return value.copy() if value.ndim else np.asarray(value)[()]  # the number, also of an array
    if type(value) in (list, tuple):
        return type(value)(_kept(item, level + 1) for item in value)
    if type(value) is not dict:
        raise _Unkept(_described(value))
    if problem := _problem_of_keys(value, value):
        raise _Unkept(problem)
    return {key: _kept(item, level + 1) for key, item in value.items()}


def _of_unknown_dtype(value: Tensor) -> str:
    return f"a tensor of {value.dtype}: keep x.to(...) of another dtype (x stands for it), such as torch.int64 or torch.float32"


def _described(value: Any) -> str:
    kind = type(value)
    found = f"an array of {value.dtype}" if kind is np.ndarray else kind.__name__
    if kind is np.ndarray and value.dtype.kind == "u":
        return f"{found}: keep x.astype(np.int64) (x stands for it)"
    instead = next((words for known, words in _INSTEAD if isinstance(value, known)), "")
    return f"{found}: keep {instead} (x stands for it)" if instead else found


def _is_number(dtype: np.dtype[Any]) -> bool:
    """That a state can keep: of the whole ones without a sign only single bytes."""
    is_wide = dtype.kind == "u" and dtype.itemsize > 1
    return dtype.kind in "biufc" and dtype.isnative and dtype.itemsize <= 8 and not is_wide


def _check_item(value: Any, place: str, places: dict[int, str], most: int | None) -> None:
    """most: items of each list and dict that are looked at, the last ones; None for all.

    places: of the lists and dicts so far, by their ids.
    """
    kind = type(value)
    if kind in _KINDS:
        return
    if kind is not list and kind is not dict and kind is not tuple:
        if problem := _problem(value):
            raise UsageError(f"Values: {_EXPECTED} at {place}, found {problem}. {_ELSE}")
        return
    if kind is not tuple:
        former = places.setdefault(id(value), place)
        if former != place:
            raise UsageError(
                f"Values: expected a {kind.__name__} of its own at {place}, found the one at {former}, which a state would give back as two, so that "
                f"what changes one of them after a restart would not change the other: put a copy there, {kind.__name__}(x)"
            )
    if kind is dict:
        items = [(key, value[key]) for key in islice(reversed(value), most)]
        if problem := _problem_of_keys(value, [key for key, _ in items]):
            raise UsageError(f"Values: {_EXPECTED} at {place}, found {problem}. {_ELSE}")
    else:
        first = 0 if most is None else max(0, len(value) - most)
        items = list(enumerate(value[first:], first))
    for key, item in items:
        _check_item(item, f"{place}[{key!r}]", places, most)


def _problem(value: Any) -> str:
    """Of what is no list, tuple or dict; empty for what a state can keep."""
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES:
            return _of_unknown_dtype(value)
        if value.grad_fn is None:
            return ""
        return "a tensor that is part of a graph: keep x.detach() (x stands for it)"
    is_array = type(value) is np.ndarray or isinstance(value, np.generic)
    return "" if is_array and _is_number(value.dtype) else _described(value)


def _problem_of_keys(value: dict[Any, Any], keys: Iterable[Any]) -> str:
    if _ARRAY in value:
        return f"a dict with the key {_ARRAY!r}, which is taken: give it another"
    other = next((type(key).__name__ for key in keys if type(key) not in (str, int)), "")
    return other and f"a dict with a key of type {other}: keep a list of pairs, list(x.items())"


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):  # a number is an array without dimensions
        return {_ARRAY: torch.from_numpy(np.asarray(value))}
    if type(value) in (list, tuple):
        return type(value)(_encoded(item) for item in value)
    if type(value) is dict:
        return {key: _encoded(item) for key, item in value.items()}
    return value


def _decoded(value: Any) -> Any:
    if type(value) is dict:
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].numpy()[()]  # of one without dimensions, the number
        return {key: _decoded(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_decoded(item) for item in value)
    return value


def _loaded(held: Any, value: Any) -> Any:
    """The value, in the tensor, array, list or dict that is there, which the recipe may name."""
    if isinstance(held, Tensor) and isinstance(value, Tensor):
        if (held.shape, held.dtype) == (value.shape, value.dtype):
            return held.copy_(value)
        return value.to(held.device)
    if isinstance(held, np.ndarray) and isinstance(value, np.ndarray):
        if (held.shape, held.dtype) == (value.shape, value.dtype):
            held[...] = value
            return held
    elif type(held) is list and type(value) is list:
        new = [_loaded(*pair) for pair in zip(held, value, strict=False)]
        held[:] = new + value[len(new) :]
        return held
    elif type(held) is dict and type(value) is dict:
        found = {key: _loaded(held.get(key), item) for key, item in value.items()}
        held.clear()
        held.update(found)
        return held
    return value
