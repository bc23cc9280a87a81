"""The instructions of a function, and where each one leads. Each code is read once in a process.

Every branch is taken for possible, whatever its condition. One way is left out: a `with` statement
is taken to pass exceptions on, unless the function names `suppress`.
"""

import dis
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType

_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT")
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFlow:
    """Instructions have numbers, from 0 on.

    onward: for each of them, those that may come next. handlers: those where an exception that it
    raises leads.
    """

    instructions: tuple[dis.Instruction, ...]
    onward: tuple[tuple[int, ...], ...]
    handlers: tuple[tuple[int, ...], ...]
    _index: dict[int, int]

    def index_of(self, offset: int) -> int:
        """The number of the instruction there."""
        return _index_of(self._index, offset)

    def start_of_line(self, number: int) -> int:
        """The first of the instructions up to this one that belong to the same line."""
        lines = [
            each.positions.lineno if each.positions else None for each in self.instructions[: number + 1]
        ]
        while number and lines[number - 1] == lines[-1]:
            number -= 1
        return number


@cache
def instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


@cache
def control_flow(code: CodeType) -> ControlFlow:
    found = instructions(code)
    index = {each.offset: number for number, each in enumerate(found)}
    passes_on = "suppress" not in code.co_names
    handlers: list[list[int]] = [[] for _ in found]
    for start, end, target in _handlers(code):
        for number, each in enumerate(found):
            if start <= each.offset < end:
                handlers[number].append(_index_of(index, target))
    return ControlFlow(
        instructions=found,
        onward=tuple(
            tuple(_successors(found, number, index, passes_on=passes_on)) for number in index.values()
        ),
        handlers=tuple(map(tuple, handlers)),
        _index=index,
    )


@cache
def loop_around(code: CodeType, offset: int) -> frozenset[int]:
    """The instructions of the loop in which the frame stands; none where it stands in none.

    They are those on a way from its own instruction back to it. offset: of that (`f_lasti`).
    """
    ways = control_flow(code)
    number = ways.index_of(offset)
    before: list[list[int]] = [[] for _ in ways.onward]
    for each, leads_to in enumerate(ways.onward):
        for other in leads_to:
            before[other].append(each)
    return frozenset(reachable(ways.onward[number], ways.onward) & reachable(before[number], before))


def reachable(start: Iterable[int], leads_to: Sequence[Iterable[int]]) -> set[int]:
    """The instructions on the ways from these, which are among them."""
    found = set[int]()
    left = list(start)
    while left:
        number = left.pop()
        if number not in found:
            found.add(number)
            left += leads_to[number]
    return found


def _index_of(index: dict[int, int], offset: int) -> int:
    """A jump may lead to a place that is not listed, such as a cache before an instruction."""
    while offset not in index:
        offset += 2
    return index[offset]


def _handlers(code: CodeType) -> Iterator[tuple[int, int, int]]:
    """Where an exception between two offsets, the second one excluded, leads."""
    for each in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        yield each.start, each.end, each.target


def _successors(
    of: Sequence[dis.Instruction], number: int, index: dict[int, int], *, passes_on: bool
) -> Iterator[int]:
    """passes_on: whether context managers do, with exceptions."""
    instruction = of[number]
    name = instruction.opname
    if name in _ENDS:
        return
    is_unconditional = name.startswith("JUMP_") and "_IF_" not in name
    if not is_unconditional:
        yield number + 1
    if instruction.opcode in _JUMPS and not (passes_on and _is_at_exit(of, number)):
        yield _index_of(index, instruction.argval)


def _is_at_exit(of: Sequence[dis.Instruction], number: int) -> bool:
    """Whether this jump is taken where a context manager lets an exception end."""
    before = number - 1
    while before > 0 and of[before].opname == "TO_BOOL":  # of Python 3.13
        before -= 1
    return of[before].opname == "WITH_EXCEPT_START"
