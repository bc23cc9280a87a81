"""Things whose hash is, or is made of, an address lie in a set in another order in each process.

These are objects without a hash of their own, functions, classes, None before Python 3.12, NaN, and
tuples, frozensets and dataclasses that hold any of them. Strings and numbers are none: the hashing
of strings is fixed for all processes of a run. A hash that the recipe defines counts if its code
names `id`.
"""

import dataclasses
from collections.abc import Collection
from functools import cache
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

MANY_ITEMS = 1000
_DEPTH = 4
_BY_ADDRESS: tuple[Any, ...] = object.__hash__, Tensor.__hash__
_BY_PARTS: tuple[Any, ...] = tuple.__hash__, frozenset.__hash__
_FUNCTIONS = FunctionType, BuiltinFunctionType, MethodType


def kind_of(things: Collection[Any]) -> str | None:
    """What a set of these has that lies in it by an address; None for another set, or a small one.

    Of many things the first ones are looked at.
    """
    if len(things) < 2:
        return None
    found = {word for each in islice(things, MANY_ITEMS) if (word := word_of(each))}
    if len(found) > 1:
        return "objects"
    return next(iter(found)) if found else None


def word_of(thing: Any, depth: int = _DEPTH) -> str:
    """What a thing is by whose hash a set has another order in each process; else empty."""
    kind: Any = type(thing)
    made: Any = kind.__hash__
    if made in _BY_PARTS and depth:
        inside = next((word for each in thing if (word := word_of(each, depth - 1))), "")
        name = {tuple: "tuples", frozenset: "frozensets"}.get(kind, f"{kind.__name__} tuples")
        return f"{name} with {inside.removeprefix('values with ')}" if inside else ""
    if isinstance(thing, float) and thing != thing:  # noqa: PLR0124 - the test for NaN
        return "values with nan"
    if made in _BY_ADDRESS or isinstance(thing, _FUNCTIONS):
        return _named(thing)
    code = getattr(made, "__code__", None)
    if dataclasses.is_dataclass(thing) and code is not None and code.co_filename == "<string>":
        fields = (
            getattr(thing, each.name, 0) for each in dataclasses.fields(thing) if each.hash is not False
        )
        return (
            f"{kind.__name__} objects" if depth and any(word_of(each, depth - 1) for each in fields) else ""
        )
    return f"{kind.__name__} objects" if code is not None and _names_id(code) else ""


@cache
def _names_id(code: CodeType) -> bool:
    return "id" in code.co_names


def _named(thing: Any) -> str:
    match thing:
        case None:
            return "values with None"
        case nn.Parameter():
            return "parameters"
        case Tensor():
            return "tensors"
        case nn.Module():
            return "modules"
        case type():
            return "classes"
        case _ if isinstance(thing, _FUNCTIONS):
            return "functions"
        case _:
            return f"{type(thing).__name__} objects"
