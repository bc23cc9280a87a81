"""The numbers that a step's functions read and the loop does not write, by the names in their code.

A temperature from the environment, a weight from a file of settings: a process that restarts after
an edit has another one. It reads code and dicts, and calls nothing. Left out are readings of
clocks, numbers of the State's modules, texts, and what a function gets from another one as a
result.

Some numbers are a process's own, such as its rank. Only all ranks together can tell one of them
from a hyperparameter that happens to be equal: they exchange what they noted, and each of them then
keeps the same. A name that stands for different numbers, on one rank or on two, is left out. So is
a whole number that is, on each rank, the rank, the process id or the number of workers: with one
worker 0, 1 and the process id; with more their number.
"""

import argparse
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, MethodType, SimpleNamespace
from typing import Any

from torch import nn

from elastic.data.own_files import is_own_class, is_own_file
from elastic.train.callables import bound_by, is_wrapper, layers, unwrapped
from elastic.train.liveness import LoopNames, globals_needed
from elastic.train.namespaces import is_own_namespace
from elastic.train.own_code import attributes, attributes_of

MANY_FUNCTIONS = 200
MANY_NUMBERS = 64
_CLOCK = 1e8  # seconds since 1970 are more
_DECIMALS = 5  # readings of other clocks have more, and are above _SMALL
_SMALL = 100.0
_WITH_ATTRIBUTES = SimpleNamespace, argparse.Namespace

Noted = dict[str, str | None]  # as text by name; None where a name stood for different numbers


class NumberInputs:
    """Of one process: what it noted, and what stands beside a state."""

    def __init__(self, there: Mapping[str, str] | None = None, own: Iterable[int] = ()) -> None:
        """there: `saved` beside the state that the loop begins with. own: the process id, the rank
        and the number of workers.
        """
        self._there = dict(there or {})
        self._own = sorted(str(number) for number in own)
        self._noted: Noted = {}
        self._saved = self._there

    def note(self, found: Mapping[str, str]) -> None:
        """Of one function, or of what the dataset was built with."""
        for name, text in found.items():
            if self._noted.setdefault(name, text) != text:
                self._noted[name] = None

    def message(self) -> tuple[Noted, list[str]]:
        """To the other ranks, as JSON values."""
        return self._noted, self._own

    def compare(self, messages: list[tuple[Noted, list[str]]]) -> list[str]:
        """The numbers that are others than beside the restored state, each with both values.

        messages: of all ranks. What is returned, and `saved` from now on, is the same on all of
        them. A first step of several passes compares after each.
        """
        of_ranks = [noted for noted, _ in messages]
        common = {
            name: text
            for name, text in of_ranks[0].items()
            if text is not None and all(noted.get(name) == text for noted in of_ranks)
        }
        differing = set[str]().union(*of_ranks) - common.keys()
        own = set.intersection(*(set(own) for _, own in messages))
        now = {name: text for name, text in common.items() if text not in own}
        self._saved = {name: text for name, text in (self._there | now).items() if name not in differing}
        return [
            f"{name} is {now[name]} and was {there}"
            for name, there in sorted(self._there.items())
            if now.get(name, there) != there
        ]

    def saved(self) -> dict[str, str]:
        """As text by name, as the ranks read them, or an earlier process where these have not."""
        return dict(sorted(self._saved.items())[:MANY_NUMBERS])


def numbers_read(function: Callable[..., Any], loop: LoopNames) -> dict[str, str]:
    """As text, by name. loop: what it writes."""
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
                        elif _counts(held):
                            found.setdefault(path, repr(held))
    return found


def numbers_among(values: Mapping[str, Any]) -> dict[str, str]:
    """Those that count, as text."""
    return {name: repr(value) for name, value in values.items() if _counts(value)}


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


def _counts(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < _CLOCK
    if type(value) is float:
        has_few = round(value, _DECIMALS) == value
        return abs(value) < _SMALL or (has_few and abs(value) < _CLOCK)
    return type(value) is bool
