"""What the functions and objects of a recipe's own code hold, without running any."""

import dis
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from inspect import CO_OPTIMIZED
from itertools import chain
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import nn

from elastic.data.attributes import space_of
from elastic.data.own_files import is_own_class, is_own_file
from elastic.train.accesses import ATTRIBUTES, Access, Action, accesses
from elastic.train.callables import bound_by, is_wrapper, layers, unwrapped
from elastic.train.control_flow import instructions

_updated: dict[type, frozenset[str]] = {}


def updated_attributes(kind: type) -> frozenset[str]:
    """The attributes that a method of the recipe's class both reads and assigns."""
    if kind not in _updated:
        found = set[str]()
        for each in kind.__mro__:
            if is_own_class(each):
                for name, made in vars(each).items():
                    for function in unwrapped(made) if name != "__init__" and is_wrapper(made) else ():
                        if is_own_file(function.__code__.co_filename):
                            read, assigned = attributes(function.__code__)
                            found |= read & assigned
        _updated[kind] = frozenset(found)
    return _updated[kind]


@cache
def rewritten_attributes(code: CodeType) -> frozenset[str]:
    """The attributes that one line of a function makes from what they, or their items, were.

    `CFG.mix *= 0.97`, `cls.shadow[name] = 0.9 * cls.shadow[name] + x`: surely no scratch space.
    """
    by_line: dict[int, list[tuple[dis.Instruction, tuple[Access, ...]]]] = {}
    for both in zip(instructions(code), accesses(code), strict=True):
        if both[0].positions is not None and both[0].positions.lineno is not None:
            by_line.setdefault(both[0].positions.lineno, []).append(both)
    found = set[str]()
    for parts in by_line.values():
        line = [each for each, _ in parts]
        named = [each for _, those in parts for each in those if each.place in ATTRIBUTES]
        read = [each.name for each in named if each.action is Action.READ]
        found |= {each.name for each in named if each.action is Action.WRITE and each.name in read}
        if any(each.opname == "STORE_SUBSCR" for each in line):
            is_in_place = any(each.opname == "BINARY_OP" and each.argrepr.endswith("=") for each in line)
            found |= {name for name in read if is_in_place or read.count(name) > 1}
    inner = (each for each in code.co_consts if isinstance(each, CodeType) and each.co_flags & CO_OPTIMIZED)
    return frozenset(found).union(*(rewritten_attributes(each) for each in inner))


@cache
def attributes(code: CodeType, *, is_whole: bool = True) -> tuple[frozenset[str], frozenset[str]]:
    """The attributes that a function reads, and those that it assigns.

    is_whole: with the functions that are made inside it, and not the classes.
    """
    read, assigned = set[str](), set[str]()
    for each in chain.from_iterable(accesses(code)):
        if each.place in ATTRIBUTES and each.action is not Action.DELETE:
            (read if each.action is Action.READ else assigned).add(each.name)
    for inner in code.co_consts if is_whole else ():
        if isinstance(inner, CodeType) and inner.co_flags & CO_OPTIMIZED:
            inner_read, inner_assigned = attributes(inner)
            read |= inner_read
            assigned |= inner_assigned
    return frozenset(read), frozenset(assigned)


def assigned_by_loop(frame: FrameType | None) -> frozenset[str]:
    """The attributes that the loops of these frames assign, and functions that they name."""
    found = frozenset[str]()
    while frame is not None:
        code, space = frame.f_code, frame.f_globals
        if is_own_file(code.co_filename):
            named = [space[name] for name in code.co_names if isinstance(space.get(name), FunctionType)]
            called = [each.__code__ for each in named if is_own_file(each.__code__.co_filename)]
            found = found.union(*(attributes(each)[1] for each in (code, *called)))
        frame = frame.f_back
    return found


def attributes_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """An object's attributes, in its dict and in its slots, without a call of its own code."""
    yield from list(space_of(thing).items())


def cell_contents(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


def filled_by_hooks(modules: Iterable[nn.Module]) -> frozenset[int]:
    """The ids of containers that forward hooks of these modules can reach."""
    found = set[int]()
    for module in modules:
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):  # noqa: SLF001
            held = [value for layer in layers(hook) for _, value in (("", layer), *bound_by(layer))]
            for function in unwrapped(hook):
                space: Mapping[str, Any] = function.__globals__
                if is_own_file(function.__code__.co_filename):
                    held += [space[name] for name in function.__code__.co_names if name in space]
            for each in held:
                found.add(id(each))
                if not isinstance(each, (nn.Module, type, ModuleType)):
                    found |= {id(value) for _, value in attributes_of(each)}
    return frozenset(found)
