"""Plain numbers of a recipe that survive: each is an attribute, and comes back as it was.

A variable of the loop (a best metric, a count of bad epochs) begins again in every generation,
because every worker runs the script from its top. As a value it is part of the state.

It does not make ranks agree: a value that is computed from a rank's own data differs between ranks,
and the comparison of states finds that.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from elastic.errors import UsageError
from elastic.train.misuse import public

_KINDS = (bool, int, float, str, type(None))


class UnknownValue(UsageError, AttributeError):  # noqa: N818
    """A name that the recipe did not give when it made its Values: a slip of the pen, perhaps."""


class Values:
    """Numbers, strings, booleans and None by name, for `State(values=elastic.Values(...))`.

        values = elastic.Values(best=math.inf, patience=0)
        values.best = min(values.best, loss)

    The names are fixed here. A tensor or a NumPy number of one element becomes its number. Raises
    UsageError for a value of another type and for a name that no value can have, and UnknownValue
    (an AttributeError too) where a name is read or set that was not given here.
    """

    @public("elastic.Values")
    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"Values({name}=...): expected another name, this one is taken")
            vars(self)[name] = _plain(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self):
            self._refuse(name)
        vars(self)[name] = _plain(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and pickle look for
            raise AttributeError(name)
        self._refuse(name)

    def __delattr__(self, name: str) -> None:
        raise UsageError(f"expected the value {name!r} to stay; set it to None where there is none")

    def __repr__(self) -> str:
        return f"Values({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ValueError for other names than these."""
        if state_dict.keys() != vars(self).keys():
            raise ValueError(
                f"expected the values {sorted(vars(self))}, found {sorted(state_dict)}; "
                "Values(...) must have the same names as when the run began"
            )
        vars(self).update(state_dict)

    def _refuse(self, name: str) -> None:
        raise UnknownValue(
            f"expected one of the values {sorted(vars(self))}, found {name!r}; "
            f"name it where the Values are made: Values({name}=...)"
        )


def _plain(name: str, value: Any) -> bool | float | str | None:
    if isinstance(value, Tensor | np.ndarray | np.generic) and np.prod(value.shape) == 1:
        value = value.item()
    if type(value) not in _KINDS:
        raise UsageError(
            f"Values: expected a number, a string, True, False or None for {name!r}, found {type(value).__name__}; "
            "tensors and lists belong into an object of their own with state_dict and load_state_dict"
        )
    return value  # type: ignore[no-any-return]
