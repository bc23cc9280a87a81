"""Attributes that outlive a pass, by the code that assigns them.

What a function assigns whenever it is called may be scratch space: it is read after that, and what
it was before does not count. What it assigns on some of its ways, as `if loss < self.lowest:
self.best = copy.deepcopy(model)` does, stays as an earlier call left it, and so does what it makes
item by item from former items. The same holds for the body of the loop, if a pass reads the
attribute before it assigns it, or the script reads it after the loop.

An attribute counts by its name alone. Of a `for` at least one pass is taken to run.
"""

import dis
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from types import CodeType

from elastic.train.accesses import ATTRIBUTES, Access, Action, accesses
from elastic.train.control_flow import control_flow, instructions, loop_around

_MAKES = "__init__", "__new__", "__post_init__", "__setstate__", "load_state_dict"


@cache
def kept_attributes(code: CodeType) -> frozenset[str]:
    """Those that a call of this function assigns, or leaves as a call before it did."""
    if code.co_name in _MAKES:
        return frozenset()
    flow = control_flow(code)
    onward, every = flow.onward, range(len(flow.instructions))
    ends = {number for number, each in enumerate(flow.instructions) if each.opname.startswith("RETURN_")}
    ways = [_at_least_once(flow.instructions, onward, number) for number in every]
    in_some = {name for name, places in _stored(code, every).items() if ends & _reachable([0], ways, places)}
    return frozenset(in_some | _made_by_items(code, every))


@cache
def carried_attributes(code: CodeType, offset: int) -> frozenset[str]:
    """Those that the loop assigns in which a frame stands, and that are read without that.

    offset: of the instruction in which the frame stands.
    """
    flow = control_flow(code)
    loop = loop_around(code, offset)
    start = [number for number in loop if flow.instructions[number].offset == offset]
    found = set[str]()
    for name, places in _stored(code, loop).items():
        reached = _reachable(start, flow.onward, places)
        if any(each.name == name for number in reached for each in _attributes(code, number, Action.READ)):
            found.add(name)
    return frozenset(found | _made_by_items(code, loop))


def _attributes(code: CodeType, number: int, action: Action) -> list[Access]:
    return [each for each in accesses(code)[number] if each.place in ATTRIBUTES and each.action is action]


def _made_by_items(code: CodeType, within: Iterable[int]) -> set[str]:
    """Whose items these instructions assign, and read as well: `self.mean[k] = f(self.mean[k])`."""
    read: Counter[str] = Counter()
    by_line: dict[int | None, set[str]] = {}
    assigning = set[int | None]()
    for number in within:
        each = instructions(code)[number]
        line = each.positions.lineno if each.positions else None
        for attribute in _attributes(code, number, Action.READ):
            read[attribute.name] += 1
            by_line.setdefault(line, set()).add(attribute.name)
        if each.opname == "STORE_SUBSCR":
            assigning.add(line)
    return {name for line in assigning for name in by_line.get(line, ()) if read[name] > 1}


def _stored(code: CodeType, within: Iterable[int]) -> dict[str, set[int]]:
    """The attributes that these instructions assign, each with where."""
    found: dict[str, set[int]] = {}
    for number in within:
        for each in _attributes(code, number, Action.WRITE):
            found.setdefault(each.name, set()).add(number)
    return found


def _at_least_once(
    of: tuple[dis.Instruction, ...], onward: tuple[tuple[int, ...], ...], number: int
) -> list[int]:
    """What comes next, where a `for` ends after a pass and not before the first."""
    if of[number].opname == "FOR_ITER":
        return [number + 1]
    after = list(onward[number])
    for each in onward[number]:
        if each < number and of[each].opname == "FOR_ITER":
            after += onward[each]
    return after


def _reachable(start: list[int], leads_to: Sequence[Iterable[int]], closed: set[int]) -> set[int]:
    """The instructions on the ways from there that lead through none of the closed ones."""
    found, left = set[int](), list(start)
    while left:
        number = left.pop()
        if number not in found and number not in closed:
            found.add(number)
            left += leads_to[number]
    return found
