"""What a recipe's loop changes survives as a value: an attribute, which comes back as it was.

A variable of the loop (a best metric, a count of bad epochs) begins again in every generation,
because every worker runs the script from its top. As a value it is part of the state. What may be
kept is checked where an attribute is set, and where the state is taken, which sees what the body
has put into lists and dicts.

It does not make ranks agree: a value that is computed from a rank's own data differs between ranks,
and the comparison of states finds that.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from elastic.errors import UsageError
from elastic.snapshot.image import DTYPES
from elastic.train.misuse import public

_KINDS = (bool, int, float, np.float64, str, type(None))


class UnknownValue(UsageError, AttributeError):  # noqa: N818
    """A name that the recipe did not give when it made its Values: a slip of the pen, perhaps."""


class Values:
    """Numbers, strings, tensors, and lists and dicts of them, by name.

        values = elastic.Values(best=math.inf, recent=[], center=torch.zeros(64))
        state = elastic.State(model=model, values=values)
        values.best = min(values.best, loss)
        values.recent.append(loss)
        values.center = 0.9 * values.center + 0.1 * center

    The names are fixed here. A value is a copy, and no part of a graph; it has the type and dtype
    that it was given with, but for a tensor without dimensions, such as a loss, which becomes its
    number; in lists and dicts, whole ones stay tensors (`dict(model.state_dict())`). Raises
    UsageError for values of other types, and for a name that no value can have, and UnknownValue
    (an AttributeError too) where a name is read or set that was not given here.
    """

    @public("elastic.Values")
    def __init__(self, **values: Any) -> None:
        for name in values:
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"Values({name}=...): expected another name, this one is taken")
        vars(self).update({name: _mapped(value, name, _copied, {}) for name, value in values.items()})

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self):
            self._refuse(name)
        vars(self)[name] = _mapped(value, name, _copied, {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and pickle look for
            raise AttributeError(name)
        self._refuse(name)

    def __repr__(self) -> str:
        return f"Values({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        """Raises UsageError for what cannot be kept, and for a list or dict that has two places."""
        places: dict[int, str] = {}
        return {name: _mapped(value, name, _checked, places) for name, value in vars(self).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ValueError for other names than these."""
        if state_dict.keys() != vars(self).keys():
            raise ValueError(
                f"expected the values {sorted(vars(self))}, found {sorted(state_dict)}; "
                "Values(...) must have the same names as when the run began"
            )
        for name, value in state_dict.items():
            vars(self)[name] = refilled(vars(self)[name], value, Tensor.copy_)

    def _refuse(self, name: str) -> None:
        raise UnknownValue(
            f"expected one of the values {sorted(vars(self))}, found {name!r}; "
            f"name it where the Values are made: Values({name}=...)"
        )


def _mapped(value: Any, place: str, leaf: Callable[[Any, str], Any], places: dict[int, str]) -> Any:
    """The same lists, tuples and dicts of what `leaf` makes of their tensors.

    places: of the lists and dicts so far, by their ids.
    """
    kind = type(value)
    if kind in _KINDS:
        return value
    if kind not in (list, tuple, dict):
        return leaf(value, place)
    if kind is not tuple and (former := places.setdefault(id(value), place)) != place:
        raise UsageError(
            f"Values: expected a {kind.__name__} of its own at {place}, found the one at {former}, which would come back as two: "
            f"put a copy there, {kind.__name__}(x)"
        )
    if kind is not dict:
        return kind(_mapped(item, f"{place}[{i}]", leaf, places) for i, item in enumerate(value))
    for key in value:
        if type(key) not in (str, int):
            raise UsageError(
                f"Values: expected keys of type str or int at {place}, found {key!r:.40}; "
                "keep a list of pairs, list(x.items())"
            )
    return {key: _mapped(item, f"{place}[{key!r}]", leaf, places) for key, item in value.items()}


def _copied(value: Any, place: str) -> Any:
    """The copy that is kept of a tensor at an attribute."""
    # A whole number inside a dict may be BatchNorm's count, which a module takes as a tensor.
    is_number = isinstance(value, Tensor) and not value.dim() and not value.is_complex()
    if is_number and ("[" not in place or value.is_floating_point()):
        return value.item()
    return _checked(value.detach() if isinstance(value, Tensor) else value, place).clone()


def _checked(value: Any, place: str) -> Any:
    """A tensor as a state has it. Raises UsageError for any other value."""
    if isinstance(value, Tensor) and value.dtype in DTYPES and value.grad_fn is None:
        return value
    found = type(value).__name__
    if isinstance(value, Tensor):
        found += " that is part of a graph" if value.grad_fn else f" of {value.dtype}"
    raise UsageError(
        f"Values: expected numbers, strings, tensors, or lists, tuples and dicts of them at {place}, found {found}; keep its "
        "content, as dict(x), x.item(), x.detach() or torch.from_numpy(x), or give an object with state_dict"
    )


def refilled(old: Any, new: Any, fill: Callable[[Tensor, Tensor], object]) -> Any:
    """The list, dict or tensor that is there, which the recipe may name, with what a load has put
    in its place: `group = optimizer.param_groups[0]` above the loop stays that group.

    fill: gives a tensor that is there the content of another one of its shape and dtype.
    """
    if new is old or type(new) is not type(old):
        return new
    if type(old) is list:
        old[:] = [*(refilled(*pair, fill) for pair in zip(old, new, strict=False)), *new[len(old) :]]
    elif type(old) in (dict, defaultdict):
        items = {key: refilled(old.get(key), item, fill) for key, item in new.items()}
        old.clear()
        old.update(items)
    elif type(old) is Tensor and old.shape == new.shape and old.dtype == new.dtype:
        fill(old, new)
    else:
        return new
    return old
