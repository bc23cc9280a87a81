"""Attributes that each pass of a loop sets before anything else can read them.

`agent.eps = max(0.05, 1 - step.number / 100)` at the top of the body is computed in each step, also
by a process that resumes: what the attribute was before does not count. Of the body only the first
instructions are looked at, up to a branch or to one that may run code of the recipe's own. What
they read are constants, `step`, numbers in `elastic.Values` and in other variables, and `math`;
they call nothing but functions of numbers. So nothing can have read the attribute.
"""

import builtins
import math
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

from elastic.train.accesses import ATTRIBUTES, Access, Action, Place, accesses
from elastic.train.control_flow import control_flow, loop_around
from elastic.train.values import Values

_NUMBERS = bool, int, float
_CALLED = frozenset(
    getattr(builtins, name) for name in ("abs", "bool", "float", "int", "max", "min", "round")
)
_STEP = "elastic.train.step", "Step"
_OF_STEP = frozenset({"number", "steps", "epoch", "fraction", "ends_epoch"})
_BETWEEN = frozenset({"map", "filter", "starmap", "zip"})  # may run code of the recipe's between passes
_VALUES = Place.LOCAL, Place.SHARED, Place.GLOBAL
_HARMLESS = frozenset(
    {
        *("LOAD_CONST", "LOAD_SMALL_INT", "UNPACK_SEQUENCE", "BINARY_OP", "UNARY_NEGATIVE", "COMPARE_OP"),
        *("PUSH_NULL", "PRECALL", "CALL", "KW_NAMES", "CACHE", "NOP", "RESUME", "EXTENDED_ARG", "NOT_TAKEN"),
    }
)


class _Setting(NamedTuple):
    """An attribute of a variable, and what was read until it was set.

    read: (variable, attribute), with an empty attribute for the variable itself. written: the
    variables that were.
    """

    variable: str
    attribute: str
    read: frozenset[tuple[str, str]]
    written: frozenset[str]


def set_first(code: CodeType, offset: int, names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(variable, attribute), where a pass of the `for` in which a frame stands sets it first.

    offset: of the instruction in which the frame stands. names: its variables and their values.
    """
    for each in _settings(code, offset):
        thing = names.get(each.variable)
        has_own_code = any("__setattr__" in vars(kind) for kind in type(thing).__mro__[:-1])
        is_plain = not has_own_code and each.attribute in getattr(thing, "__dict__", {})
        if is_plain and all(_is_number(*read, names, each.written) for read in each.read):
            yield each.variable, each.attribute


@cache
def read_after_loop(code: CodeType, offset: int) -> frozenset[str]:
    """The attributes that the code reads outside of the loop in which the frame stands."""
    inside = loop_around(code, offset)
    outside = (those for number, those in enumerate(accesses(code)) if number not in inside)
    read = (each for those in outside for each in those if each.action is Action.READ)
    return frozenset(each.name for each in read if each.place in ATTRIBUTES)


@cache
def _settings(code: CodeType, offset: int) -> tuple[_Setting, ...]:
    flow = control_flow(code)
    number = flow.index_of(offset)
    if flow.instructions[number].opname != "FOR_ITER" or not _BETWEEN.isdisjoint(code.co_names):
        return ()
    found: list[_Setting] = []
    read, written = set[tuple[str, str]](), set[str]()
    loaded = None  # the variable that was loaded just before
    number += 1
    while number < len(flow.instructions) and flow.onward[number] == (number + 1,):
        named = accesses(code)[number]
        if not named and flow.instructions[number].opname not in _HARMLESS:
            break
        for each in named or (None,):
            variable, loaded = loaded, None
            match each:
                case Access(Action.READ, place, name) if place in _VALUES:
                    loaded = name
                case Access(Action.WRITE, Place.ATTRIBUTE, name) if variable is not None:
                    found.append(_Setting(variable, name, frozenset(read), frozenset(written)))
                    variable = None
                case Access(Action.READ, Place.ATTRIBUTE, name) if variable is not None:
                    read.add((variable, name))
                    variable = None
                case Access(Action.WRITE, place, name) if place in _VALUES:
                    written.add(name)
                case Access():
                    return tuple(found)
                case None:
                    pass
            if variable is not None:
                read.add((variable, ""))
        number += 1
    return tuple(found)


def _is_number(variable: str, attribute: str, names: Mapping[str, Any], written: frozenset[str]) -> bool:
    """Whether this surely reads a number, a step or a function of numbers, and runs no own code.

    written: variables that the pass has written before.
    """
    thing = names.get(variable, getattr(builtins, variable, None))
    if (type(thing).__module__, type(thing).__qualname__) == _STEP:
        return not attribute or attribute in _OF_STEP
    if not attribute:
        return type(thing) in _NUMBERS or (variable not in written and _is_among(thing, _CALLED))
    if variable in written:
        return False
    return thing is math or (type(thing) is Values and type(vars(thing).get(attribute)) in _NUMBERS)


def _is_among(thing: Any, functions: frozenset[Any]) -> bool:
    return any(thing is each for each in functions)
