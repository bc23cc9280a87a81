"""What each instruction reads and writes by a name: alike for Python 3.11, 3.12, 3.13 and 3.14.

Some instructions of Python 3.13 and 3.14 access two variables, one after the other. Python 3.12 and
newer run a comprehension in the function where it stands: the variables of the comprehension are
none of that function's there either, though they may hide some of the same names meanwhile.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from types import CodeType
from typing import Any, NamedTuple, Protocol

from elastic.train.control_flow import control_flow

_NAMED = re.compile(
    r"(LOAD|STORE|DELETE)_(?:FROM_DICT_OR_)?(FAST|DEREF|CLASSDEREF|CLOSURE|NAME|GLOBAL|SUPER_ATTR|ATTR|METHOD)"
)
_SAVES = "LOAD_FAST_AND_CLEAR"  # the function's variable, before a comprehension uses the name


class Action(Enum):
    READ = "LOAD"
    WRITE = "STORE"
    DELETE = "DELETE"


class Place(Enum):
    """Where a name stands for something.

    SHARED: in a variable that functions share, the outer one's. HANDED: such a variable itself is
    given to a function that is made. OF_SUPER: in what `super()` gives.
    """

    LOCAL = "a variable of the function alone"
    SHARED = "a variable of two functions"
    HANDED = "such a variable, which a new function gets"
    GLOBAL = "a variable of the module"
    ATTRIBUTE = "an attribute"
    OF_SUPER = "an attribute, found by super()"


VARIABLES = frozenset({Place.LOCAL, Place.SHARED, Place.HANDED, Place.GLOBAL})
ATTRIBUTES = frozenset({Place.ATTRIBUTE, Place.OF_SUPER})
_PLACES = {
    "FAST": Place.LOCAL,
    "DEREF": Place.SHARED,
    "CLASSDEREF": Place.SHARED,
    "CLOSURE": Place.HANDED,
    "NAME": Place.GLOBAL,
    "GLOBAL": Place.GLOBAL,
    "ATTR": Place.ATTRIBUTE,
    "METHOD": Place.ATTRIBUTE,
    "SUPER_ATTR": Place.OF_SUPER,
}


class Access(NamedTuple):
    action: Action
    place: Place
    name: str


class Instruction(Protocol):
    """As `dis` gives it; tests have lists of it that other versions of Python gave."""

    @property
    def opname(self) -> str: ...
    @property
    def argval(self) -> Any: ...
    @property
    def positions(self) -> Any: ...


@cache
def accesses(code: CodeType) -> tuple[tuple[Access, ...], ...]:
    """By the number of an instruction, in the order in which it does them.

    The variables of a comprehension that runs in the function itself are left out.
    """
    flow = control_flow(code)
    ends = {
        number: [flow.index_of(each.argval), *flow.handlers[number]]
        for number, each in enumerate(flow.instructions)
        if each.opname == "FOR_ITER"
    }
    return accesses_in(flow.instructions, ends, cells={*code.co_cellvars, *code.co_freevars})


def accesses_in(
    listing: Sequence[Instruction], ends: Mapping[int, Sequence[int]], cells: Collection[str] = ()
) -> tuple[tuple[Access, ...], ...]:
    """ends: by the number of a FOR_ITER, where its loop ends, and where an error in it leads."""
    found = [list(accesses_of(each, cells)) for each in listing]
    # The inner comprehensions first, which may use the same names.
    for number in reversed(range(len(listing))):
        if listing[number].opname == _SAVES:
            name = listing[number].argval
            for inside, giving_back in _hidden(listing, found, number, ends):
                for each in inside:
                    found[each] = [one for one in found[each] if not _is_of(one, name)]
                if giving_back is not None:  # it may do something else too
                    found[giving_back].remove(next(one for one in found[giving_back] if _is_of(one, name)))
    return tuple(map(tuple, found))


def accesses_of(instruction: Instruction, cells: Collection[str] = ()) -> Iterator[Access]:
    """Of one instruction alone. cells: names of variables that its function shares with others."""
    if instruction.opname == _SAVES:
        return
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    for (action, where), name in zip(_named_by(instruction.opname), names, strict=False):
        # Since Python 3.13 LOAD_FAST also gives a shared variable to a function that is made.
        place = Place.HANDED if where == "FAST" and name in cells else _PLACES[where]
        yield Access(Action(action), place, name)


@cache
def _named_by(opname: str) -> list[tuple[str, str]]:
    return _NAMED.findall(opname)


def _hidden(
    listing: Sequence[Instruction], found: list[list[Access]], saving: int, ends: Mapping[int, Sequence[int]]
) -> Iterator[tuple[range, int | None]]:
    """Where a comprehension has the name, and the instruction that gives it back to the function.

    That is the first one after its loop that accesses the name: one after the last pass, and one
    after an error. saving: the instruction with which that begins.
    """
    name = listing[saving].argval
    loop = next((each for each in range(saving, len(listing)) if each in ends), None)
    if loop is None or any(each.opname == "GET_ANEXT" for each in listing[saving:loop]):  # `async for`
        return
    for begin, end in zip((saving, *ends[loop][1:]), ends[loop], strict=True):
        after = range(end, len(listing))
        last = next((each for each in after if any(_is_of(one, name) for one in found[each])), None)
        if last is not None and _is_of_other_statement(listing[last], listing[saving]):
            last = None
        yield range(begin, end if last is None else last), last


def _is_of_other_statement(storing: Instruction, saving: Instruction) -> bool:
    """`x = [x for x in y]` stores twice into x, and the compiler may leave out the first one."""
    places = storing.positions, saving.positions
    if isinstance(storing.argval, tuple) or None in places or places[0].col_offset is None:
        return False
    return bool(places[0] != places[1])


def _is_of(access: Access, name: str) -> bool:
    return access.name == name and access.place in VARIABLES
