"""Classes and modules of the recipe's own hold data as objects do, and what holds it is found here.

`CFG.mix`, `Ema.shadow`, a counter beside the functions of an imported file: nothing in the loop has
such a value in a variable of its own, and a process that restarts has it as the file makes it. No
code of the recipe's runs: attributes are read from the dicts of classes and modules. Functions are
among the data where they can remember something: in a default, in a closure, in a cache.
"""

from collections.abc import Iterator
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

from elastic.data.own_files import is_own_class, is_own_file
from elastic.train.callables import is_wrapper, layers
from elastic.train.own_code import rewritten_attributes

_CONSTANT = bool, int, float, complex, str, bytes, type(None), type, ModuleType
_OF_CLASSES = "_abc_impl", "_abc_registry", "_is_protocol", "_is_runtime_protocol"

_remembering: dict[type, tuple[tuple[str, Any], ...]] = {}


def is_own_module(thing: Any) -> bool:
    """Whether it is a module that lies in a file of the recipe's own, or in none."""
    if not isinstance(thing, ModuleType):
        return False
    path = vars(thing).get("__file__")
    if path is None:  # made by hand, `cfg = types.ModuleType("cfg")`; Python's own have a spec
        return vars(thing).get("__spec__") is None and thing.__name__ != "__main__"
    return isinstance(path, str) and is_own_file(path)


def is_own_namespace(thing: Any) -> bool:
    """Whether data of the recipe's can be attributes of this class or module."""
    if isinstance(thing, type):
        return is_own_class(thing)
    return is_own_module(thing)


def own_classes(thing: Any) -> list[type]:
    """The recipe's own among an object's class and those that this inherits from."""
    return [each for each in type(thing).__mro__ if is_own_class(each)]


def data_of(space: Any) -> Iterator[tuple[str, Any]]:
    """The data of one class, without those of its bases, or of a module."""
    if isinstance(space, type):
        if not issubclass(space, Enum):
            yield from _data_of_class(space)
        return
    for name, value in list(vars(space).items()):
        if name.startswith("__") or (isinstance(value, (type, ModuleType)) and not is_own_namespace(value)):
            continue
        if not is_wrapper(value) or can_remember(value):
            yield name, value


def functions_of(space: Any) -> Iterator[Any]:
    """What a use of this class or module may run, or names in turn."""
    spaces = [each for each in space.__mro__ if is_own_class(each)] if isinstance(space, type) else [space]
    for each in spaces:
        yield from (made for made in list(vars(each).values()) if is_wrapper(made) or is_own_namespace(made))


def rewritten_in(space: Any) -> frozenset[str]:
    """The attributes that some function of it makes from what they were."""
    return frozenset().union(
        *(
            rewritten_attributes(layer.__code__)
            for made in functions_of(space)
            for layer in (layers(made) if is_wrapper(made) else ())
            if isinstance(layer, FunctionType) and is_own_file(layer.__code__.co_filename)
        )
    )


def can_remember(made: Any) -> bool:
    """Whether a function has something that outlives a call: a cell, a mutable default, a cache."""
    for layer in layers(made):
        if not isinstance(layer, FunctionType):
            if type(layer).__name__ != "function" and not isinstance(layer, (staticmethod, classmethod)):
                return True
            continue
        defaults = (*(layer.__defaults__ or ()), *(layer.__kwdefaults__ or {}).values())
        if layer.__closure__ or any(not isinstance(each, _CONSTANT) for each in defaults):
            return True
        if any(not name.startswith("__") for name in vars(layer)):
            return True
    return False


def _data_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(kind).items()):
        if name.startswith("__") or name in _OF_CLASSES:
            continue
        if isinstance(value, (type, ModuleType)):
            if is_own_namespace(value):
                yield name, value
        elif not is_wrapper(value) and (is_own_class(type(value)) or not hasattr(type(value), "__get__")):
            yield name, value
    if kind not in _remembering:
        made = [(name, value) for name, value in vars(kind).items() if is_wrapper(value)]
        _remembering[kind] = tuple((name, value) for name, value in made if can_remember(value))
    yield from _remembering[kind]
