"""The numbers that a step's functions read and the loop does not write, by the names in their code.

A temperature from the environment, a weight from a file of settings: a process that restarts after
an edit has another one. It reads code and dicts, and calls nothing. Left out are numbers that every
process has for itself (readings of clocks, process ids, the number of workers), those of the
State's modules, texts, and what a function gets from another one as a result.
"""

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, MethodType, SimpleNamespace
from typing import Any

from torch import nn

from elastic.train.callables import bound_by, is_wrapper, layers, unwrapped
from elastic.train.liveness import LoopNames, globals_needed
from elastic.train.namespaces import is_own_namespace
from elastic.train.own_code import attributes, attributes_of, is_own_class, is_own_file

MANY_FUNCTIONS = 200
MANY_NUMBERS = 64
_CLOCK = 1e8  # seconds since 1970 are more
_DECIMALS = 5  # readings of other clocks have more, and are above _SMALL
_SMALL = 100.0
_WITH_ATTRIBUTES = SimpleNamespace, argparse.Namespace


def numbers_read(function: Callable[..., Any], loop: LoopNames, own: frozenset[int]) -> dict[str, str]:
    """As text, by name. loop: what it writes. own: numbers that only this process has."""
    found: dict[str, str] = {}
    seen = set[int]()
    waiting: deque[Any] = deque([function])
    while waiting and len(seen) < MANY_FUNCTIONS and len(found) < MANY_NUMBERS:
        thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        codes = [each.__code__ for each in unwrapped(thing) if is_own_file(each.__code__.co_filename)]
        for name, value in _named(thing):
            if name not in loop.written:
                for code in codes:
                    for path, held in _parts(name, value, code, loop.assigned):
                        if is_wrapper(held):
                            waiting.append(held)
                        elif _counts(held, own):
                            found.setdefault(path, repr(held))
    return found


def numbers_among(values: Mapping[str, Any], own: frozenset[int]) -> dict[str, str]:
    """Those that count, as text."""
    return {name: repr(value) for name, value in values.items() if _counts(value, own)}


def _named(thing: Any) -> Iterator[tuple[str, Any]]:
    """What each layer of a function closes over, is bound to, and finds among its globals."""
    for layer in layers(thing):
        bound = [
            ("self", each) if isinstance(layer, MethodType) else (name, each)
            for name, each in bound_by(layer)
        ]
        yield from ((name, each) for name, each in bound if name)
    for each in unwrapped(thing):
        if is_own_file(each.__code__.co_filename):
            known = each.__globals__
            yield from (
                (name, known[name]) for name in sorted(globals_needed(each.__code__)) if name in known
            )


def _parts(name: str, value: Any, code: CodeType, assigned: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """The value itself, or those of its attributes and items that the code names."""
    if isinstance(value, nn.Module):
        return
    if isinstance(value, dict):
        keys = {each for each in code.co_consts if isinstance(each, str)}
        yield from ((f"{name}[{key!r}]", value[key]) for key in sorted(keys & value.keys()))
        return
    is_object = is_own_class(type(value)) or isinstance(value, _WITH_ATTRIBUTES)
    if not is_own_namespace(value) and (is_wrapper(value) or not is_object):
        yield name, value
        return
    held = dict(vars(value) if is_own_namespace(value) else attributes_of(value))
    if is_object and not is_own_namespace(value):
        held = {
            key: each for kind in reversed(type(value).__mro__) for key, each in vars(kind).items()
        } | held
    read = attributes(code)[0] - assigned
    for key in sorted(read & held.keys()):
        yield f"{name}.{key}", held[key]


def _counts(value: Any, own: frozenset[int]) -> bool:
    if type(value) is int:
        return value not in own and abs(value) < _CLOCK
    if type(value) is float:
        has_few = round(value, _DECIMALS) == value
        return abs(value) < _SMALL or (has_few and abs(value) < _CLOCK)
    return type(value) is bool
