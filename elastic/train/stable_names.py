"""What a function reads is known by variables that the loop does not write.

A variable of the frame that iterates over the steps, or of one above it, or a global one, stands
for one object in all steps, if the loop does not write it. What only a variable of a step has (a
copy of the model that each step makes, one of several teachers that the epoch chooses) may be
another object in each process's first step, and has no stable name. Nor has an attribute that the
loop, or a method that it calls, assigns.

It does not see that a function which the loop calls writes a global variable, or an item of a
container: a look at what the loop remembers does (loop_memory.py).
"""

import re
import sys
from collections.abc import Iterator
from functools import partial
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from elastic.data.own_files import is_own_file
from elastic.train.callables import WRAPPED
from elastic.train.liveness import LoopNames, names_in_loop
from elastic.train.own_code import attributes, cell_contents
from elastic.train.site import Form, Site

_KEEPS_A_COPY = sys.version_info < (3, 13)  # a frame keeps the dict that its f_locals gave
_SIMPLE = str, int, float, bytes, type(None), ModuleType, type


class StableNames:
    """Of one loop. of_codes: what the loop has in each of its frames, by its code."""

    def __init__(self, of_codes: dict[CodeType, LoopNames]) -> None:
        self._of_codes = of_codes
        self._written = frozenset[str]().union(*(each.written for each in of_codes.values()))

    @classmethod
    def of_loop(cls, frame: FrameType | None) -> "StableNames":
        """frame: that which iterates over the steps, or one below it."""
        return cls({each.f_code: names_in_loop(each.f_code, each.f_lasti) for each in own_frames(frame)})

    def of_loop_names(self) -> LoopNames:
        """What the loop itself writes."""
        assigned = (each.assigned for each in self._of_codes.values())
        return LoopNames(written=self._written, assigned=frozenset[str]().union(*assigned))

    def roots(self, function: Any, frame: FrameType | None) -> tuple[dict[str, Any], LoopNames]:
        """(what the function reads, by stable names; the names of the loop and the frames below).

        frame: of the step's call, or below it.
        """
        stable: dict[int, str] = {}
        below = set[CodeType]()
        for each in own_frames(frame):
            if not stable and each.f_code not in self._of_codes:
                below.add(each.f_code)
                continue
            for name, value in variables_of(each).items():
                if name not in self._written and not name.startswith("__"):
                    stable[id(value)] = min(name, stable.get(id(value), name))
        found = _Roots(stable, self._written)
        found.enter(stable.get(id(function), ""), function)
        names = self._of_codes.values()
        assigned = [*(each.assigned for each in names), *(attributes(each)[1] for each in below)]
        mentioned = [*(each.mentioned for each in names), *(each.co_names for each in below)]
        return found.by_name, LoopNames(
            written=self._written,
            assigned=frozenset[str]().union(*assigned),
            mentioned=frozenset[str]().union(*mentioned),
        )


def below(root: str, sites: list[Site], loop: LoopNames) -> Iterator[tuple[str, Site]]:
    """The sites with names that tell the root as well, but for what the loop assigns."""
    functions = {
        name: value
        for site in sites
        if site.form is Form.CLASS
        for name, value in vars(site.thing).items()
        if isinstance(value, FunctionType)
    }
    called, new = set[str](), set(loop.mentioned)
    while new := (new & functions.keys()) - called:
        called |= new
        new = {each for name in new for each in functions[name].__code__.co_names}
    assigned = loop.assigned.union(*(attributes(functions[name].__code__)[1] for name in called))
    short = root.rpartition(": ")[2]
    for site in sites:
        first, *others = re.findall(r"[A-Za-z_]\w*", site.path) or [""]
        if not assigned.intersection(others) and (first == short or first not in loop.written):
            is_below = site.path.startswith(short)
            yield root[: -len(short)] + site.path if is_below else f"{root}: {site.path}", site


class _Roots:
    """stable: names of objects, by their ids."""

    def __init__(self, stable: dict[int, str], written: frozenset[str]) -> None:
        self.by_name: dict[str, Any] = {}
        self._stable = stable
        self._written = written
        self._seen: list[Any] = []

    def enter(self, name: str, thing: Any) -> None:
        """name: a stable one, or empty."""
        if isinstance(thing, _SIMPLE) or any(thing is each for each in self._seen):
            return
        match thing:
            case FunctionType() | MethodType() | partial():
                self._seen.append(thing)
                for inner, part in _held(thing):
                    self._enter_part(name, inner, part)
                if isinstance(thing, FunctionType) and is_own_file(thing.__code__.co_filename):
                    for each in sorted(_global_names(thing.__code__) - self._written):
                        if each in thing.__globals__:
                            self.enter(each, thing.__globals__[each])
            case _ if name:
                self.by_name[name] = thing
            case _:
                pass

    def _enter_part(self, owner: str, inner: str, part: Any) -> None:
        known = self._stable.get(id(part), "")
        beside = (f"{owner}: {inner}" if inner else owner) if owner else ""
        self.enter(known or beside, part)


def _held(function: Any) -> Iterator[tuple[str, Any]]:
    match function:
        case partial():
            yield "", function.func
            yield from ((f"argument {number}", each) for number, each in enumerate(function.args))
            yield from function.keywords.items()
        case MethodType():
            yield "", function.__self__
            yield "", function.__func__
        case FunctionType():
            for wrapped in WRAPPED:
                yield "", vars(function).get(wrapped)
            if is_own_file(function.__code__.co_filename):
                cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                yield from ((name, each) for name, cell in cells for each in cell_contents(cell))
                for number, default in enumerate(function.__defaults__ or ()):
                    yield f"default {number}", default
                yield from (function.__kwdefaults__ or {}).items()
        case _:
            pass


def _global_names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    return names.union(*(_global_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def own_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if is_own_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Its own, and the global ones that it sees."""
    found = dict(frame.f_globals)
    if frame.f_code.co_flags & CO_OPTIMIZED:
        seen = frame.f_locals
        found |= seen
        if _KEEPS_A_COPY:
            seen.clear()  # lest the frame keep alive what its variables no longer name
    return found
