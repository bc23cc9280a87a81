"""A variable is live at an instruction if a path from there reads it before it is written.

The analysis is the textbook's: a backward fixpoint over the instructions of one function, from
their reads and writes of variables by name. It takes every branch for possible (control_flow.py),
so it errs towards live. Whether an object changes that a variable names, it does not know.
"""

import dis
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, reduce
from inspect import (
    CO_ASYNC_GENERATOR,
    CO_COROUTINE,
    CO_GENERATOR,
    CO_OPTIMIZED,
    CO_VARARGS,
    CO_VARKEYWORDS,
)
from itertools import chain
from operator import or_
from types import CodeType
from typing import NamedTuple

from elastic.train.accesses import VARIABLES, Access, Action, Place, accesses
from elastic.train.control_flow import control_flow, instructions, loop_around, reachable
from elastic.train.left_out_code import is_left_out

_GLOBAL = "*"


class Variable(NamedTuple):
    """module: that of a global variable; empty for a variable of the function itself."""

    module: str
    name: str


class _Access(NamedTuple):
    variable: Variable
    is_read: bool  # else it is written or deleted


# What stands for all code that loads samples, and names that a step loads them under.
LOADING = Variable("*", "loading")
IMPORTS = "import"  # stands for a module whose variables are the modules that code imports
_COMPUTING = frozenset({"mean_loss", "sum"})

# The variables that a read of a variable may read as well: those of a function that it names.
Mentions = Callable[[Variable], Iterable[Variable]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What is live where a frame goes on, after the call or the `for` that it stands in.

    A process that resumes begins with the values from before the loop.

    carried: live on a way without exceptions, and written before the loop or by other code: the
        process would go on silently with the value from before.
    after_loop: what each pass writes and the code before the loop too, and only the code after it
        reads: no pass may be left to do.
    in_some: what the loop alone writes, in some passes. Without a value it raises a NameError, and
        a later pass may give it another one than that of the pass before the restart.
    targets: of a `for` over tuples, those of its targets that the body reads.
    at_end: of a `for`, live where it has ended.
    """

    carried: frozenset[Variable]
    after_loop: frozenset[Variable] = frozenset()
    in_some: frozenset[Variable] = frozenset()
    targets: tuple[Variable, ...] = ()
    at_end: frozenset[Variable] = frozenset()


def live_after(code: CodeType, offset: int, module: str, mentions: Mentions) -> Live:
    """offset: of the instruction in which the frame stands (`f_lasti`)."""
    flow, ways = _Flow(code, module, mentions), control_flow(code)
    here, loop = ways.index_of(offset), loop_around(code, offset)
    plain = flow.fixpoint()
    onward = here + 1
    instruction = ways.instructions[here]
    is_for = instruction.opname == "FOR_ITER"
    # The statement of a call may have read variables that it needs when the call returns.
    places = [onward] if is_for else [onward, ways.start_of_line(here)]
    live = frozenset().union(*(plain.at(each) for each in places))
    before = flow.written_before(loop)
    in_some = (live & flow.written(loop)) - before
    carried = live - in_some
    if not is_for:
        return Live(carried=carried, in_some=in_some)
    end = ways.index_of(instruction.argval)
    targets, body = flow.targets(onward)
    read = plain.at(body) | flow.read(range(onward, body))
    return Live(
        carried=carried,
        in_some=in_some,
        after_loop=(plain.at(end) - carried) & flow.written(range(onward, end)) & before,
        targets=tuple(each for each in targets if each in read) if len(targets) > 1 else (),
        at_end=plain.at(end),
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
    loop, its = loop_around(code, offset), _accesses(code, "")
    inside = [each for number in loop for each in accesses(code)[number]]
    written = (each for number in loop for each in its[number] if not each.is_read)
    return LoopNames(
        written=frozenset(each.variable.name for each in written),
        assigned=frozenset(each.name for each in inside if each[:2] == (Action.WRITE, Place.ATTRIBUTE)),
        mentioned=frozenset(each.name for each in inside if each.name in code.co_names),
    )


@cache
def globals_needed(code: CodeType) -> frozenset[str]:
    """The global names whose value at a call a function, or a function inside it, may read.

    Not those that it writes first on every way, as it does with a scratch variable. A generator,
    which goes on in the middle, needs all that it reads.
    """
    of_module = [each for those in accesses(code) for each in those if each.place is Place.GLOBAL]
    is_generator = code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)
    if any(each.action is Action.WRITE for each in of_module) and not is_generator:
        at_entry = _Flow(code, _GLOBAL, lambda _: ()).fixpoint(has_errors=True).at(0)
        names = frozenset(each.name for each in at_entry if each.module == _GLOBAL)
    else:
        names = frozenset(each.name for each in of_module if each.action is Action.READ)
    inside = (each for each in code.co_consts if isinstance(each, CodeType) and not is_left_out(each))
    return names.union(*(globals_needed(each) for each in inside))


@cache
def computes(code: CodeType) -> bool:
    """Whether a function, or one inside it, may call the step's mean_loss or sum."""
    return not _COMPUTING.isdisjoint(code.co_names) or any(
        computes(each) for each in code.co_consts if isinstance(each, CodeType)
    )


@cache
def imported(code: CodeType) -> frozenset[str]:
    """The modules that a function, or one inside it, imports where it runs, also by their names."""
    inside = (imported(each) for each in code.co_consts if isinstance(each, CodeType))
    names = (each.argval for each in instructions(code) if _imports(each, code))
    return frozenset(names).union(*inside)


def _imports(instruction: dis.Instruction, code: CodeType) -> bool:
    """Any text may be the name of a module where the code imports one by its name."""
    if instruction.opname == "IMPORT_NAME":
        return True
    is_by_name = not {"import_module", "__import__"}.isdisjoint(code.co_names)
    return is_by_name and instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, str)


def _accesses(code: CodeType, module: str) -> tuple[tuple[_Access, ...], ...]:
    """What each instruction reads and writes itself, in its order."""
    both = zip(instructions(code), accesses(code), strict=True)
    return tuple(tuple(_accesses_of(each, those, module, code)) for each, those in both)


def _accesses_of(
    instruction: dis.Instruction, named: Iterable[Access], module: str, code: CodeType
) -> Iterator[_Access]:
    """named: what the instruction reads and writes by names."""
    if _imports(instruction, code):
        yield _Access(Variable(IMPORTS, instruction.argval), is_read=True)
        return
    if isinstance(instruction.argval, CodeType):  # a function is made, which reads when it is called
        if is_left_out(instruction.argval):
            return
        for name in globals_needed(instruction.argval):
            yield _Access(Variable(module, name), is_read=True)
        for name in imported(instruction.argval):
            yield _Access(Variable(IMPORTS, name), is_read=True)
        if computes(instruction.argval):
            yield _Access(LOADING, is_read=True)
        return
    for each in named:
        if each.place in VARIABLES:
            variable = Variable(module if each.place is Place.GLOBAL else "", each.name)
            yield _Access(variable, is_read=each.action is Action.READ)
        elif each.name in _COMPUTING and each.action is Action.READ:
            yield _Access(LOADING, is_read=True)


class _LiveBefore(NamedTuple):
    """By the number of an instruction. masks: a bit for each of the variables."""

    masks: list[int]
    variables: list[Variable]

    def at(self, number: int) -> frozenset[Variable]:
        mask = self.masks[number]
        return frozenset(each for bit, each in enumerate(self.variables) if mask >> bit & 1)


class _Flow:
    """What each instruction of a function reads and writes, where it leads, and what is live."""

    def __init__(self, code: CodeType, module: str, mentions: Mentions) -> None:
        self.ways = control_flow(code)
        self._code = code
        self.accesses = _accesses(code, module)
        named = set(chain.from_iterable(self.accesses))
        mentioned = {each.variable: tuple(mentions(each.variable)) for each in named if each.is_read}
        found = {each.variable for each in named}.union(*mentioned.values())
        self._variables = sorted(found)
        self._bits = {each: 1 << number for number, each in enumerate(self._variables)}
        # By the variable that is read, as bits: itself, and those that this may read as well.
        self._read = {
            each: reduce(or_, map(self._bits.__getitem__, others), self._bits[each])
            for each, others in mentioned.items()
        }
        # By instruction, as bits: what it reads before it writes it, and what it writes.
        self._effects = [self._effect(of_one) for of_one in self.accesses]

    def fixpoint(self, *, has_errors: bool = False) -> "_LiveBefore":
        """The variables that are live before each instruction."""
        effects, count, handlers = self._effects, len(self.accesses), self.ways.handlers
        onward = self.ways.onward
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
                    for each in handlers[number]:
                        found |= live[each]
                if found != live[number]:
                    live[number], is_stable = found, False
        return _LiveBefore(masks=live, variables=self._variables)

    def _effect(self, accesses: tuple[_Access, ...]) -> tuple[int, int]:
        read = written = 0
        for access in reversed(accesses):
            if access.is_read:
                read |= self._read[access.variable]
            else:
                bit = self._bits[access.variable]
                read, written = read & ~bit, written | bit
        return read, written

    def written(self, numbers: Iterable[int]) -> frozenset[Variable]:
        return frozenset(
            each.variable for number in numbers for each in self.accesses[number] if not each.is_read
        )

    def read(self, numbers: Iterable[int]) -> frozenset[Variable]:
        return frozenset(
            each.variable for number in numbers for each in self.accesses[number] if each.is_read
        )

    def written_before(self, loop: frozenset[int]) -> frozenset[Variable]:
        """The variables that may have a value where the loop begins."""
        outside = [[each for each in onward if each not in loop] for onward in self.ways.onward]
        return self.written(reachable([0], outside)) | self._given_to_function()

    def _given_to_function(self) -> frozenset[Variable]:
        """Its parameters, and the variables that other functions may write."""
        code = self._code
        if not code.co_flags & CO_OPTIMIZED:
            return frozenset()
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
        given = {Variable("", name) for name in (*code.co_varnames[:count], *code.co_freevars)}
        return frozenset(given.union(each for each in self._variables if each.module))

    def targets(self, start: int) -> tuple[list[Variable], int]:
        """The variables that a `for` assigns, and the first instruction of its body."""
        found: list[Variable] = []
        left, number = 1, start
        while left and number < len(self.accesses):
            instruction = self.ways.instructions[number]
            if instruction.opname == "UNPACK_SEQUENCE":
                left += instruction.argval - 1
            stored = [each.variable for each in self.accesses[number] if not each.is_read]
            if not stored and instruction.opname not in ("UNPACK_SEQUENCE", "EXTENDED_ARG"):
                break  # an attribute or an item, or more than this looks for
            found += stored
            left -= len(stored)
            number += 1
        return found, number
