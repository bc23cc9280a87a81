"""A variable is live at an instruction if a path from there reads it before it is written.

The analysis is the textbook's: a backward fixpoint over the instructions of one function, from
their reads and writes of variables by name. It takes every branch for possible, so it errs towards
live. One way is left out: a `with` statement is taken to pass exceptions on, unless the function
names `suppress`. Whether an object changes that a variable names, it does not know. It misses a
variable that a comprehension of Python 3.12 or newer hides behind one of the same name.
"""

import dis
import re
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from inspect import (
    CO_ASYNC_GENERATOR,
    CO_COROUTINE,
    CO_GENERATOR,
    CO_OPTIMIZED,
    CO_VARARGS,
    CO_VARKEYWORDS,
)
from types import CodeType
from typing import NamedTuple

_ACCESS = re.compile(r"(LOAD|STORE|DELETE)_(FAST|DEREF|CLASSDEREF|CLOSURE|NAME|GLOBAL)")
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT")
_GLOBAL = "*"
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])


class Variable(NamedTuple):
    """module: that of a global variable; empty for a variable of the function itself."""

    module: str
    name: str


class _Access(NamedTuple):
    variable: Variable
    is_read: bool  # else it is written or deleted


# What stands for all code that loads samples, and names that a step loads them under.
LOADING = Variable("*", "loading")
_COMPUTING = frozenset({"mean_loss", "sum"})

# The variables that a read of a variable may read as well: those of a function that it names.
Mentions = Callable[[Variable], Iterable[Variable]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What is live where a frame goes on, after the call or the `for` that it stands in.

    A process that resumes begins with the values from before the loop.

    carried: live on a way without exceptions. Also a variable that was written before the loop and
        in some passes: the process would go on silently with the value from before.
    on_errors: live on ways with an exception alone.
    after_loop: what the loop writes and only the code after it reads, if the last pass does not
        always write it as it should be: each pass writes it and the code before the loop too (no
        pass may be left to do); or some passes write it, and nothing else.
    in_some: those of after_loop that only some passes write. The process has no such variable.
    targets: of a `for` over tuples, those of its targets that the body reads.
    """

    carried: frozenset[Variable]
    on_errors: frozenset[Variable]
    after_loop: frozenset[Variable] = frozenset()
    in_some: frozenset[Variable] = frozenset()
    targets: tuple[Variable, ...] = ()


def live_after(code: CodeType, offset: int, module: str, mentions: Mentions) -> Live:
    """offset: of the instruction in which the frame stands (`f_lasti`)."""
    flow = _Flow(code, module, mentions)
    here = flow.index_of(offset)
    loop = flow.loop_of(here)
    plain, all_ways = flow.fixpoint(), flow.fixpoint(has_errors=True)
    staying = flow.fixpoint(within=loop)
    onward = here + 1
    instruction = flow.instructions[here]
    is_for = instruction.opname == "FOR_ITER"
    # The statement of a call may have read variables that it needs when the call returns.
    places = [onward] if is_for else [onward, flow.start_of_line(here)]
    live = frozenset().union(*(plain.at(each) for each in places))
    in_loop = frozenset().union(*(staying.at(each) for each in places))
    before = flow.written_before(loop)
    only_after = ((live - in_loop) & flow.written(loop)) - before
    carried = live - only_after
    on_errors = all_ways.at(onward) - plain.at(onward)
    if not is_for:
        return Live(carried=carried, on_errors=on_errors, after_loop=only_after, in_some=only_after)
    end = flow.index_of(instruction.argval)
    targets, body = flow.targets(onward)
    return Live(
        carried=carried,
        on_errors=on_errors,
        in_some=only_after,
        after_loop=only_after | (plain.at(end) - carried) & flow.written(range(onward, end)) & before,
        targets=tuple(each for each in targets if each in plain.at(body)) if len(targets) > 1 else (),
    )


class LoopNames(NamedTuple):
    """Of the code of a loop.

    written: variables. assigned: attributes. mentioned: all that are no variables of the function.
    """

    written: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()
    mentioned: frozenset[str] = frozenset()


@cache
def names_in_loop(code: CodeType, offset: int) -> LoopNames:
    """Of the loop in which the frame stands; none where it stands in none.

    offset: as in `live_after`.
    """
    flow = _Flow(code, "", lambda _: ())
    loop = flow.loop_of(flow.index_of(offset))
    inside = [flow.instructions[number] for number in loop]
    return LoopNames(
        written=frozenset(each.name for each in flow.written(loop)),
        assigned=frozenset(each.argval for each in inside if each.opname == "STORE_ATTR"),
        mentioned=frozenset(each.argval for each in inside if each.argval in code.co_names),
    )


@cache
def ways_of(code: CodeType) -> tuple[tuple[dis.Instruction, ...], tuple[tuple[int, ...], ...]]:
    """The instructions of a function, and for each the numbers of those that may come next."""
    flow = _Flow(code, "", lambda _: ())
    return flow.instructions, tuple(map(tuple, flow.onward))


@cache
def loop_around(code: CodeType, offset: int) -> frozenset[int]:
    """The numbers of the instructions of the loop in which the frame stands; none for none.

    offset: as in `live_after`.
    """
    flow = _Flow(code, "", lambda _: ())
    return frozenset(flow.loop_of(flow.index_of(offset)))


@cache
def globals_needed(code: CodeType) -> frozenset[str]:
    """The global names whose value at a call a function, or a function inside it, may read.

    Not those that it writes first on every way, as it does with a scratch variable. A generator,
    which goes on in the middle, needs all that it reads.
    """
    writes = any(each.opname == "STORE_GLOBAL" for each in _instructions(code))
    is_generator = code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)
    if writes and not is_generator:
        at_entry = _Flow(code, _GLOBAL, lambda _: ()).fixpoint(has_errors=True).at(0)
        names = frozenset(each.name for each in at_entry if each.module == _GLOBAL)
    else:
        names = frozenset(
            each.argval for each in _instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        )
    return names.union(*(globals_needed(each) for each in code.co_consts if isinstance(each, CodeType)))


@cache
def computes(code: CodeType) -> bool:
    """Whether a function, or one inside it, may call the step's mean_loss or sum."""
    return not _COMPUTING.isdisjoint(code.co_names) or any(
        computes(each) for each in code.co_consts if isinstance(each, CodeType)
    )


@cache
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


@cache
def _handlers(code: CodeType) -> tuple[tuple[int, int, int], ...]:
    """Where an exception between two offsets, the second one excluded, leads."""
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    return tuple((each.start, each.end, each.target) for each in entries)


class _LiveBefore(NamedTuple):
    """By the number of an instruction. masks: a bit for each of the variables."""

    masks: list[int]
    variables: list[Variable]

    def at(self, number: int) -> frozenset[Variable]:
        mask = self.masks[number]
        return frozenset(each for bit, each in enumerate(self.variables) if mask >> bit & 1)


class _Flow:
    """The instructions of a function, what each one reads and writes, and where each one leads."""

    def __init__(self, code: CodeType, module: str, mentions: Mentions) -> None:
        self.instructions = _instructions(code)
        self._code = code
        self._index = {each.offset: number for number, each in enumerate(self.instructions)}
        self._module = module
        self.accesses = [list(self._accesses(each, mentions)) for each in self.instructions]
        self.onward = [list(self._successors(number)) for number in range(len(self.instructions))]
        self._handlers: list[list[int]] = [[] for _ in self.instructions]
        for start, end, target in _handlers(code):
            for number, each in enumerate(self.instructions):
                if start <= each.offset < end:
                    self._handlers[number].append(self.index_of(target))
        self._variables = sorted({each.variable for of_one in self.accesses for each in of_one})
        # By instruction, as bits: what it reads before it writes it, and what it writes.
        self._effects = [self._effect(of_one) for of_one in self.accesses]

    def index_of(self, offset: int) -> int:
        """A jump may lead to a place that is not listed, such as a cache before an instruction."""
        while offset not in self._index:
            offset += 2
        return self._index[offset]

    def fixpoint(self, *, has_errors: bool = False, within: Container[int] | None = None) -> "_LiveBefore":
        """The variables that are live before each instruction.

        within: the numbers of the instructions that a way may lead through, None for all.
        """
        effects, count = self._effects, len(self.instructions)
        onward = [[each for each in ways if within is None or each in within] for ways in self.onward]
        live, is_stable = [0] * (count + 1), False
        while not is_stable:
            is_stable = True
            for number in reversed(range(count)):
                found = 0
                for each in onward[number]:
                    found |= live[each]
                read, written = effects[number]
                found = (found & ~written) | read
                if has_errors:
                    for each in self._handlers[number]:
                        found |= live[each]
                if found != live[number]:
                    live[number], is_stable = found, False
        return _LiveBefore(masks=live, variables=self._variables)

    def _effect(self, accesses: list[_Access]) -> tuple[int, int]:
        read = written = 0
        for access in reversed(accesses):
            bit = 1 << bisect_left(self._variables, access.variable)
            read, written = (read | bit, written) if access.is_read else (read & ~bit, written | bit)
        return read, written

    def loop_of(self, number: int) -> set[int]:
        """The instructions on a way from this one back to it; none if no way leads back."""
        onward = self._reachable(self.onward[number], self.onward)
        before: list[list[int]] = [[] for _ in self.onward]
        for each, leads_to in enumerate(self.onward):
            for other in leads_to:
                before[other].append(each)
        return onward & self._reachable(before[number], before)

    def written(self, numbers: Iterable[int]) -> frozenset[Variable]:
        return frozenset(
            each.variable for number in numbers for each in self.accesses[number] if not each.is_read
        )

    def written_before(self, loop: set[int]) -> frozenset[Variable]:
        """The variables that may have a value where the loop begins."""
        outside = [[each for each in onward if each not in loop] for onward in self.onward]
        return self.written(self._reachable([0], outside)) | self._given_to_function()

    def _given_to_function(self) -> frozenset[Variable]:
        """Its parameters, and the variables that other functions may write."""
        code = self._code
        if not code.co_flags & CO_OPTIMIZED:
            return frozenset()
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
        given = {Variable("", name) for name in (*code.co_varnames[:count], *code.co_freevars)}
        everywhere = (each.variable for of_one in self.accesses for each in of_one)
        return frozenset(given | {each for each in everywhere if each.module})

    def _reachable(self, start: Iterable[int], leads_to: list[list[int]]) -> set[int]:
        found = set[int]()
        left = list(start)
        while left:
            number = left.pop()
            if number not in found:
                found.add(number)
                left += leads_to[number]
        return found

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
            for name in globals_needed(instruction.argval):
                yield from self._read(Variable(self._module, name), mentions)
            if computes(instruction.argval):
                yield from self._read(LOADING, mentions)
            return
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval in _COMPUTING:
            yield from self._read(LOADING, mentions)
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
        if instruction.opcode in _JUMPS and not self._swallows(number):
            yield self.index_of(instruction.argval)

    def _swallows(self, number: int) -> bool:
        """Whether this jump is taken where a context manager lets an exception end."""
        if "suppress" in self._code.co_names:
            return False
        before = number - 1
        while before > 0 and self.instructions[before].opname == "TO_BOOL":  # of Python 3.13
            before -= 1
        return self.instructions[before].opname == "WITH_EXCEPT_START"
