"""What a recipe's loop changes survives as a value: an attribute, which comes back as it was.

A variable of the loop (a best metric, a count of bad epochs) begins again in every generation,
because every worker runs the script from its top. As a value it is part of the state.

It does not make ranks agree: a value that is computed from a rank's own data differs between ranks,
and the comparison of states finds that.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic.errors import UsageError
from elastic.train.misuse import public

_KINDS = (bool, int, float, str, type(None))
_ARRAY = "ndarray"  # the only key of the dict that stands for an array in a state


class UnknownValue(UsageError, AttributeError):  # noqa: N818
    """A name that the recipe did not give when it made its Values: a slip of the pen, perhaps."""


class Values:
    """Numbers, strings, tensors, arrays, and lists and dicts of them, by name.

        values = elastic.Values(best=math.inf, recent=[], center=torch.zeros(64))
        state = elastic.State(model=model, values=values)
        values.best = min(values.best, loss)
        values.recent.append(loss)
        values.center = 0.9 * values.center + 0.1 * center

    The names are fixed here. A value is a copy, and no part of a graph; a tensor or a NumPy number
    of one element becomes its number. Raises UsageError for a value of another type and for a name
    that no value can have, and UnknownValue (an AttributeError too) where a name is read or set
    that was not given here.
    """

    @public("elastic.Values")
    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"Values({name}=...): expected another name, this one is taken")
            vars(self)[name] = _kept(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self):
            self._refuse(name)
        vars(self)[name] = _kept(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and pickle look for
            raise AttributeError(name)
        self._refuse(name)

    def __delattr__(self, name: str) -> None:
        raise UsageError(f"expected the value {name!r} to stay; set it to None where there is none")

    def __repr__(self) -> str:
        return f"Values({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
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


def _kept(name: str, value: Any) -> Any:
    """A copy of the value. Raises UsageError for one that a state cannot keep."""
    if isinstance(value, Tensor | np.ndarray | np.generic) and np.prod(value.shape) == 1:
        value = value.item()
    if type(value) in _KINDS:
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is np.ndarray and _is_number(value.dtype):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(_kept(name, item) for item in value)
    if type(value) is dict and _ARRAY not in value and all(type(key) in (str, int) for key in value):
        return {key: _kept(name, item) for key, item in value.items()}
    raise UsageError(
        f"Values: expected numbers, strings, tensors, arrays of numbers, or lists and dicts of them for {name!r}, found "
        f"{type(value).__name__}; anything else belongs into an object of its own with state_dict and load_state_dict"
    )


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" and dtype.isnative and dtype.itemsize <= 8


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {_ARRAY: torch.from_numpy(value)}
    if type(value) in (list, tuple):
        return type(value)(_encoded(item) for item in value)
    if type(value) is dict:
        return {key: _encoded(item) for key, item in value.items()}
    return value


def _decoded(value: Any) -> Any:
    if type(value) is dict:
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].numpy()
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
        held[:] = value
        return held
    elif type(held) is dict and type(value) is dict:
        held.clear()
        held.update(value)
        return held
    return value
