"""The variables of a recipe whose values a pass of its loop hands on to the next one.

The frames between the iterator and the top of the script are the loop's; their code says which
variables are live where they go on (liveness.py). A function that a variable names reads its global
variables, and those that it closes over, where it is named; an object of a class of the recipe's
own does so by all its methods.
"""

import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from elastic.train.liveness import Variable, globals_read, live_after
from elastic.train.own_code import attributes, is_own_class, is_own_file

Named = list[tuple[str, Any]]
_KEEPS_A_COPY = sys.version_info < (3, 13)  # a frame keeps the dict that its f_locals gave


@dataclass(slots=True, kw_only=True)
class LoopVariables:
    """Names with their values, at the beginning of a pass.

    carried: one pass hands them on to the next. on_errors: only after an exception. targets: of the
    `for` itself, beside the step. after_loop: written in each pass, and read after the loop.
    assigned: attributes that functions of the loop assign. cells: the variables of its frames.
    """

    carried: Named = field(default_factory=list)
    on_errors: Named = field(default_factory=list)
    targets: Named = field(default_factory=list)
    after_loop: list[str] = field(default_factory=list)
    assigned: set[str] = field(default_factory=set)
    cells: set[tuple[str, int]] = field(default_factory=set)


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


class _Names:
    """What the variables of one frame stand for."""

    def __init__(self, frame: FrameType) -> None:
        self.module = str(frame.f_globals.get("__name__", ""))
        self.own: dict[str, Any] = {}
        self.assigned: set[str] = set()
        if frame.f_code.co_flags & CO_OPTIMIZED:
            seen = frame.f_locals
            self.own = dict(seen)
            if _KEEPS_A_COPY:
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

    def _read_by(self, variable: Variable) -> Iterator[Variable]:
        value = self._spaces.get(variable.module, {}).get(variable.name)
        for function in _functions(value):
            space = function.__globals__
            module = str(space.get("__name__", ""))
            self._spaces.setdefault(module, space)
            if isinstance(value, FunctionType):
                self.assigned |= attributes(function.__code__)[1]
            for name in globals_read(function.__code__):
                if name in space and not isinstance(space[name], (ModuleType, type)):
                    yield Variable(module, name)
            for name in function.__code__.co_freevars:
                if name in self.own:
                    yield Variable("", name)


def _functions(value: Any) -> Iterator[FunctionType]:
    """The functions of the recipe's own that a call of this value, or of a method, may run."""
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, MethodType):
        yield from _functions(value.__func__)
        value = value.__self__
    if isinstance(value, FunctionType):
        if is_own_file(value.__code__.co_filename):
            yield value
        return
    kinds = {type(each) for each in value.modules()} if isinstance(value, nn.Module) else {type(value)}
    for kind in kinds:
        for each in kind.__mro__:
            if is_own_class(each):
                yield from (
                    function for function in vars(each).values() if isinstance(function, FunctionType)
                )
