"""A variable is live at an instruction if a path from there reads it before it is written.

The analysis is the textbook's: a backward fixpoint over the instructions of one function, from
their reads and writes of variables by name. It takes every branch for possible, so it errs towards
live. Whether an object changes that a variable names, it does not know. It misses a variable that a
comprehension of Python 3.12 or newer hides behind one of the same name.
"""

import dis
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import NamedTuple

_ACCESS = re.compile(r"(LOAD|STORE|DELETE)_(FAST|DEREF|CLASSDEREF|CLOSURE|NAME|GLOBAL)")
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT")
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])


class Variable(NamedTuple):
    """module: that of a global variable; empty for a variable of the function itself."""

    module: str
    name: str


class _Access(NamedTuple):
    variable: Variable
    is_read: bool  # else it is written or deleted


# The variables that a read of a variable may read as well: those of a function that it names.
Mentions = Callable[[Variable], Iterable[Variable]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What is live where a frame goes on, after the call or the `for` that it stands in.

    carried: on a way without exceptions. on_errors: on the others alone. after_loop: of a `for`,
    the variables that its body writes in every pass and the code after it reads. targets: of a
    `for` over tuples, those of its targets that the body reads.
    """

    carried: frozenset[Variable]
    on_errors: frozenset[Variable]
    after_loop: frozenset[Variable] = frozenset()
    targets: tuple[Variable, ...] = ()


def live_after(code: CodeType, offset: int, module: str, mentions: Mentions) -> Live:
    """offset: of the instruction in which the frame stands (`f_lasti`)."""
    flow = _Flow(code, module, mentions)
    here = flow.index_of(offset)
    plain, all_ways = flow.fixpoint(has_errors=False), flow.fixpoint(has_errors=True)
    onward = here + 1
    instruction = flow.instructions[here]
    carried = plain[onward]
    on_errors = all_ways[onward] - carried
    if instruction.opname != "FOR_ITER":
        # The statement may have read variables that it needs when the call returns.
        return Live(carried=carried | plain[flow.start_of_line(here)], on_errors=on_errors)
    end = flow.index_of(instruction.argval)
    written = {each.variable for body in flow.accesses[onward:end] for each in body if not each.is_read}
    targets, body = flow.targets(onward)
    return Live(
        carried=carried,
        on_errors=on_errors,
        after_loop=frozenset((plain[end] - carried) & written),
        targets=tuple(each for each in targets if each in plain[body]) if len(targets) > 1 else (),
    )


@cache
def globals_read(code: CodeType) -> frozenset[str]:
    """The global names that a function, or a function inside it, may read."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return frozenset(names).union(
        *(globals_read(each) for each in code.co_consts if isinstance(each, CodeType))
    )


class _Flow:
    """The instructions of a function, what each one reads and writes, and where each one leads."""

    def __init__(self, code: CodeType, module: str, mentions: Mentions) -> None:
        self.instructions = list(dis.get_instructions(code))
        self._index = {each.offset: number for number, each in enumerate(self.instructions)}
        self._module = module
        self.accesses = [list(self._accesses(each, mentions)) for each in self.instructions]
        self._next = [list(self._successors(number)) for number in range(len(self.instructions))]
        self._handlers: list[list[int]] = [[] for _ in self.instructions]
        for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
            for number, each in enumerate(self.instructions):
                if entry.start <= each.offset < entry.end:
                    self._handlers[number].append(self.index_of(entry.target))

    def index_of(self, offset: int) -> int:
        """A jump may lead to a place that is not listed, such as a cache before an instruction."""
        while offset not in self._index:
            offset += 2
        return self._index[offset]

    def fixpoint(self, *, has_errors: bool) -> list[frozenset[Variable]]:
        """The variables that are live before each instruction."""
        live: list[frozenset[Variable]] = [frozenset()] * (len(self.instructions) + 1)
        is_stable = False
        while not is_stable:
            is_stable = True
            for number in reversed(range(len(self.instructions))):
                onward = self._next[number]
                found = live[onward[0]].union(*(live[each] for each in onward[1:])) if onward else frozenset()
                for access in reversed(self.accesses[number]):
                    found = found | {access.variable} if access.is_read else found - {access.variable}
                if has_errors:
                    found = found.union(*(live[each] for each in self._handlers[number]))
                if found != live[number]:
                    live[number], is_stable = found, False
        return live

    def start_of_line(self, number: int) -> int:
        """The first of the instructions up to this one that belong to the same line."""
        lines = [
            each.positions.lineno if each.positions else None for each in self.instructions[: number + 1]
        ]
        while number and lines[number - 1] == lines[-1]:
            number -= 1
        return number

    def targets(self, start: int) -> tuple[list[Variable], int]:
        """The variables that a `for` assigns, and the first instruction of its body."""
        found: list[Variable] = []
        left, number = 1, start
        while left and number < len(self.instructions):
            instruction = self.instructions[number]
            if instruction.opname == "UNPACK_SEQUENCE":
                left += instruction.argval - 1
            stored = [each.variable for each in self.accesses[number] if not each.is_read]
            if not stored and instruction.opname not in ("UNPACK_SEQUENCE", "EXTENDED_ARG"):
                break  # an attribute or an item, or more than this looks for
            found += stored
            left -= len(stored)
            number += 1
        return found, number

    def _accesses(self, instruction: dis.Instruction, mentions: Mentions) -> Iterator[_Access]:
        if isinstance(instruction.argval, CodeType):  # a function is made, which reads when it is called
            for name in globals_read(instruction.argval):
                yield from self._read(Variable(self._module, name), mentions)
            return
        if instruction.opname == "LOAD_FAST_AND_CLEAR":  # a comprehension puts its own variable there
            return
        kinds = _ACCESS.findall(instruction.opname)
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        for (action, place), name in zip(kinds, names, strict=False):
            variable = Variable(self._module if place in ("NAME", "GLOBAL") else "", name)
            if action == "LOAD":
                yield from self._read(variable, mentions)
            else:
                yield _Access(variable, is_read=False)

    def _read(self, variable: Variable, mentions: Mentions) -> Iterator[_Access]:
        yield _Access(variable, is_read=True)
        for each in mentions(variable):
            yield _Access(each, is_read=True)

    def _successors(self, number: int) -> Iterator[int]:
        instruction = self.instructions[number]
        name = instruction.opname
        if name in _ENDS:
            return
        is_unconditional = name.startswith("JUMP_") and "_IF_" not in name
        if not is_unconditional:
            yield number + 1
        if instruction.opcode in _JUMPS:
            yield self.index_of(instruction.argval)
