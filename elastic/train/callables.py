"""Which Python functions a callable runs is found through all that wraps them, without a call.

A decorator, a partial, a bound method or a compiled function has code of a library in front of the
recipe's own. One that wraps by a closure alone, without `functools.wraps`, is seen through where it
holds the function directly; code that looks its function up (in a table, say) is not.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property, partial, partialmethod
from types import FunctionType, MethodType
from typing import Any

from elastic.data.attributes import dict_of

WRAPPED = "__wrapped__", "_torchdynamo_orig_callable"  # of functools.wraps, of torch.compile
_CALLED = "__call__", "forward"  # by the class of an object
_WRAPPERS = partial, partialmethod, cached_property, MethodType, staticmethod, classmethod, property


def is_wrapper(thing: Any) -> bool:
    """Whether it stands for functions, though it may be none itself: not an object with a call."""
    return isinstance(thing, (FunctionType, *_WRAPPERS)) or "__wrapped__" in dict_of(thing)


def wrapped_by(thing: Any) -> list[Any]:
    """What a call of it runs next, or what it is made of; nothing for a plain function."""
    match thing:
        case type():
            return []
        case partial() | partialmethod() | cached_property():
            return [thing.func]
        case MethodType() | staticmethod() | classmethod():
            return [thing.__func__]
        case property():
            return [each for each in (thing.fget, thing.fset, thing.fdel) if each is not None]
        case _:
            pass
    attributes = dict_of(thing)
    wrapped = [attributes[name] for name in WRAPPED if name in attributes]
    if wrapped or isinstance(thing, FunctionType):
        return wrapped
    modules = attributes.get("_modules")
    if isinstance(modules, dict) and "_orig_mod" in modules:  # of torch.compile(module)
        return [modules["_orig_mod"]]
    kinds = [vars(kind) for kind in type(thing).__mro__]
    found = (next((each[name] for each in kinds if name in each), None) for name in _CALLED)
    return [each for each in found if is_wrapper(each)]


def bound_by(thing: Any) -> Iterator[tuple[str, Any]]:
    """What a call has at hand besides its arguments, with the names of variables of closures."""
    match thing:
        case partial() | partialmethod():
            for value in (*thing.args, *thing.keywords.values()):
                yield "", value
        case MethodType():
            yield "", thing.__self__
        case FunctionType():
            names = thing.__code__.co_freevars
            for name, cell in zip(names, thing.__closure__ or (), strict=True):
                with suppress(ValueError):  # it is empty
                    yield name, cell.cell_contents
            for value in (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()):
                yield "", value
        case _:
            pass


def layers(thing: Any) -> list[Any]:
    """The callable, what it wraps, what that wraps, and so on."""
    found: dict[int, Any] = {}
    left = deque([thing])
    while left:
        each = left.popleft()
        if id(each) not in found:
            found[id(each)] = each
            left.extend(wrapped_by(each))
    return [*found.values()]


def unwrapped(thing: Any) -> list[FunctionType]:
    """The Python functions that a call passes through, the outermost first."""
    return [each for each in layers(thing) if isinstance(each, FunctionType)]


def code_key(thing: Any) -> tuple[object, ...]:
    """A key that functions made again from the same lines share, alike on every rank.

    It has the code of each layer, and no object's identity: a recipe makes functions in each step,
    and all ranks must find a function known or unknown in the same call.
    """
    functions = unwrapped(thing)
    return tuple(each.__code__ for each in functions) or (type(thing),)
