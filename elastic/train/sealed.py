"""A recipe adds no attribute to objects of this library: no state would save what is in it.

`run.best = loss` and `state.ema = ...` look as if they were kept. They are refused where they are
written. Attributes that the constructor sets, and those of a recipe's own subclass, are free.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from elastic.errors import UsageError

C = TypeVar("C", bound=type)


def sealed(word: str) -> Callable[[C], C]:
    """word: what recipes call such an object."""

    def seal(kind: C) -> C:
        construct, put = kind.__init__, object.__setattr__  # type: ignore[misc]

        @wraps(construct)
        def construct_and_seal(self: Any, *args: Any, **kwargs: Any) -> None:
            construct(self, *args, **kwargs)
            put(self, "_is_sealed", True)

        def set_attribute(self: Any, name: str, value: Any) -> None:
            known = vars(self)
            is_new = name not in known and not isinstance(getattr(kind, name, None), property)
            if is_new and "_is_sealed" in known and type(self) is kind:
                raise UsageError(_refusal(word, name))
            put(self, name, value)

        kind.__init__, kind.__setattr__ = construct_and_seal, set_attribute  # type: ignore[misc,method-assign,assignment]
        return kind

    return seal


def _refusal(word: str, name: str) -> str:
    return (
        f"{word}.{name} = ...: {word} has no attribute of that name, and no state would save it, so that a process which restarts would lack it. What the loop "
        f"changes goes into elastic.Values({name}=...), which goes into the State; an object with a state_dict goes into State(..., {name}=...); what stays as "
        "it is goes into a variable of the script"
    )
