"""A recipe adds no attribute to objects of this library: no state would save what is in it.

`run.best = loss` and `state.ema = ...` look as if they were kept. They are refused where they are
written. Attributes that the class itself assigns, and those of a recipe's own subclass, are free.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from elastic.errors import UsageError
from elastic.train.callables import is_wrapper, unwrapped
from elastic.train.own_code import attributes

C = TypeVar("C", bound=type)


def sealed(word: str, *others: str) -> Callable[[C], C]:
    """word: what recipes call such an object. others: names that other modules of ours assign."""

    def seal(kind: C) -> C:
        methods = [each for made in vars(kind).values() if is_wrapper(made) for each in unwrapped(made)]
        names = frozenset(others).union(*(attributes(each.__code__)[1] for each in methods))
        names |= {name for name, made in vars(kind).items() if isinstance(made, property)}
        put = object.__setattr__

        def set_attribute(self: Any, name: str, value: Any) -> None:
            if name not in names and type(self) is kind:
                raise UsageError(_refusal(word, name))
            put(self, name, value)

        kind.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
        return kind

    return seal


def _refusal(word: str, name: str) -> str:
    return (
        f"{word}.{name} = ...: {word} has no attribute of that name, and no state would save it, so that a process which restarts would lack it. What the loop "
        f"changes goes into elastic.Values({name}=...), which goes into the State; an object with a state_dict goes into State(..., {name}=...); what stays as "
        "it is goes into a variable of the script"
    )
