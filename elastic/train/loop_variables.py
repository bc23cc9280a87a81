"""The variables of a recipe whose values a pass of its loop hands on to the next one.

The frames between the iterator and the top of the script are the loop's; their code says which
variables are live where they go on (liveness.py). A function that a variable names reads its global
variables, and those that it closes over, where it is named, also behind a decorator, in a partial
or in a container; an object of a class of the recipe's own, that class itself, and a module of the
recipe's own do so by all their functions.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from itertools import islice
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic.errors import UsageError
from elastic.train.callables import bound_by, is_wrapper, unwrapped, wrapped_by
from elastic.train.liveness import Variable, globals_read, live_after
from elastic.train.namespaces import functions_of, is_own_namespace
from elastic.train.own_code import (
    attributes,
    attributes_of,
    is_own_class,
    is_own_file,
    rewritten_attributes,
)

MANY_OBJECTS = 5_000
MANY_ITEMS = 1000  # of one container
DEPTH = 6

Named = list[tuple[str, Any]]
_REFERENCES = 3  # to that dict, by its frame, by the variable that names it, and by the call that counts
_NO_FUNCTIONS = bool, int, float, str, bytes, type(None), Tensor, np.ndarray
_KEEPS_A_COPY = sys.version_info < (3, 13)  # a frame keeps the dict that its f_locals gave


@dataclass(slots=True, kw_only=True)
class LoopVariables:
    """Names with their values, at the beginning of a pass.

    carried: one pass hands them on to the next. on_errors: only after an exception. targets: of the
    `for` itself, beside the step. after_loop: written in each pass, and read after the loop.
    assigned: attributes that functions of the loop assign. rewritten: those that a line of theirs
    makes from what they were. cells: the variables of its frames. read_by_functions: the names that
    functions read which the script names.
    """

    carried: Named = field(default_factory=list)
    on_errors: Named = field(default_factory=list)
    targets: Named = field(default_factory=list)
    after_loop: list[str] = field(default_factory=list)
    assigned: set[str] = field(default_factory=set)
    rewritten: set[str] = field(default_factory=set)
    cells: set[tuple[str, int]] = field(default_factory=set)
    read_by_functions: set[str] = field(default_factory=set)


def loop_variables(frame: FrameType | None) -> LoopVariables:
    """frame: that which asked for the next step, or one that it called."""
    found = LoopVariables()
    while frame is not None:
        if is_own_file(frame.f_code.co_filename):
            _add(found, frame)
        frame = frame.f_back
    return found


def _add(found: LoopVariables, frame: FrameType) -> None:
    names = _Names(frame)
    found.cells |= {(name, id(value)) for name, value in names.own.items()}
    live = live_after(frame.f_code, frame.f_lasti, names.module, names.mentions)
    found.carried += names.values(live.carried)
    found.on_errors += names.values(live.on_errors)
    found.targets += names.values(live.targets)
    found.after_loop += sorted(each.name for each in live.after_loop)
    found.assigned |= attributes(frame.f_code, is_whole=False)[1] | names.assigned
    found.rewritten |= rewritten_attributes(frame.f_code) | names.rewritten
    found.read_by_functions |= names.read_by_functions


class _Names:
    """What the variables of one frame stand for."""

    def __init__(self, frame: FrameType) -> None:
        self.module = str(frame.f_globals.get("__name__", ""))
        self.own: dict[str, Any] = {}
        self.assigned: set[str] = set()
        self.rewritten: set[str] = set()
        if frame.f_code.co_flags & CO_OPTIMIZED:
            seen = frame.f_locals
            is_recipes = sys.getrefcount(seen) > _REFERENCES
            self.own = dict(seen)
            for name in (name for name, value in self.own.items() if value is seen):
                raise UsageError(_of_locals(name, frame.f_code.co_name))
            if _KEEPS_A_COPY and not is_recipes:
                seen.clear()  # lest the frame keep alive what its variables no longer name
        self._spaces = {self.module: frame.f_globals, "": self.own}
        self._mentioned: dict[Variable, tuple[Variable, ...]] = {}

    def values(self, variables: Iterable[Variable]) -> Named:
        found = []
        for each in sorted(variables):
            space = self._spaces.get(each.module, {})
            if each.name in space and not each.name.startswith("__"):
                is_here = each.module in ("", self.module)
                found.append((each.name if is_here else f"{each.module}.{each.name}", space[each.name]))
        return found

    def mentions(self, variable: Variable) -> tuple[Variable, ...]:
        """All that a function which the variable names may read, and those that it names."""
        known = self._mentioned.get(variable)
        if known is None:
            seen: set[Variable] = set()
            left = [variable]
            while left:
                for each in self._read_by(left.pop()):
                    if each not in seen:
                        seen.add(each)
                        left.append(each)
            known = self._mentioned[variable] = tuple(seen)
        return known

    @property
    def read_by_functions(self) -> set[str]:
        return {each.name for mentioned in self._mentioned.values() for each in mentioned}

    def _read_by(self, variable: Variable) -> Iterator[Variable]:
        value = self._spaces.get(variable.module, {}).get(variable.name)
        if is_wrapper(value):
            self.assigned |= frozenset().union(
                *(attributes(each.__code__)[1] for each in unwrapped(value) if _is_own(each))
            )
        for function in _functions(value):
            self.rewritten |= rewritten_attributes(function.__code__)
            space = function.__globals__
            module = str(space.get("__name__", ""))
            self._spaces.setdefault(module, space)
            for name in globals_read(function.__code__):
                if name in space and _counts(space[name]):
                    yield Variable(module, name)
            for name in function.__code__.co_freevars:
                if name in self.own:
                    yield Variable("", name)


def _functions(value: Any) -> Iterator[FunctionType]:
    """The functions of the recipe's own that a use of this value may run.

    They are those that it wraps, binds or holds in containers and attributes, and all methods of an
    object of a class of the recipe's own.
    """
    seen: dict[int, Any] = {}  # by id; kept, so that no other object gets it
    waiting = deque([(value, DEPTH)])
    while waiting and len(seen) < MANY_OBJECTS:
        thing, depth = waiting.popleft()
        if id(thing) in seen or isinstance(thing, _NO_FUNCTIONS):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, FunctionType) and _is_own(thing):
            yield thing
        if depth:
            waiting.extend((part, depth - 1) for part in _parts(thing))


def _parts(thing: Any) -> Iterator[Any]:
    """What may be, or hold, functions that a use of this runs."""
    if isinstance(thing, dict):
        if "__builtins__" not in thing:  # else it is what globals() gives
            yield from islice(thing.values(), MANY_ITEMS)
        return
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        yield from islice(thing, MANY_ITEMS)
        return
    if isinstance(thing, (type, ModuleType)):
        yield from functions_of(thing) if is_own_namespace(thing) else ()
        return
    yield from wrapped_by(thing)
    if is_wrapper(thing):
        for _, bound in bound_by(thing):
            yield bound
        return
    if isinstance(thing, (nn.Module, Optimizer)):
        modules = thing.modules() if isinstance(thing, nn.Module) else ()
        for each in (thing, *modules):
            yield from (hooks for name, hooks in vars(each).items() if name.endswith("_hooks") and hooks)
    elif is_own_class(type(thing)):
        yield from (held for _, held in attributes_of(thing))
    kinds = {type(each) for each in thing.modules()} if isinstance(thing, nn.Module) else {type(thing)}
    for each in {each for kind in kinds for each in kind.__mro__ if is_own_class(each)}:
        yield from (made for made in vars(each).values() if is_wrapper(made))


def _counts(value: Any) -> bool:
    """Whether a global variable with this value may be, or hold, what the loop changes."""
    return not isinstance(value, (ModuleType, type)) or is_own_namespace(value)


def _of_locals(name: str, function: str) -> str:
    version = ".".join(map(str, sys.version_info[:2]))
    return (
        f"{name} is the dict that locals() gave, and Python {version} fills it again whenever the variables of {function}() are looked at, as is done to find "
        f"what the loop remembers: write {name} = dict(locals())"
    )


def _is_own(function: FunctionType) -> bool:
    return is_own_file(function.__code__.co_filename)
