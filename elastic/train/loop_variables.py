"""The variables of a recipe whose values a pass of its loop hands on to the next one.

The frames between the iterator and the top of the script are the loop's; their code says which
variables are live where they go on (liveness.py). A function that a variable names reads its global
variables, and those that it closes over, where it is named, also behind a decorator, in a partial
or in a container; an object of a class of the recipe's own, that class itself, and a module of the
recipe's own do so by all their functions. The code that loads samples (the dataset's, collate)
reads where a step computes something; or, in data-loading processes, ahead of the pass.
"""

import builtins
import sys
from collections import ChainMap, Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import CO_OPTIMIZED
from itertools import chain, islice
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any
from weakref import ProxyTypes

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic.data.own_files import is_own_class, is_own_file
from elastic.errors import UsageError
from elastic.train import structure
from elastic.train.address_order import handed_on, iterated
from elastic.train.callables import bound_by, is_wrapper, unwrapped, wrapped_by
from elastic.train.kept_attributes import carried_attributes, kept_attributes
from elastic.train.left_out_code import is_left_out
from elastic.train.liveness import (
    IMPORTS,
    LOADING,
    Live,
    Variable,
    computes,
    globals_needed,
    imported,
    live_after,
    names_in_loop,
)
from elastic.train.loading_code import written_variables
from elastic.train.namespaces import functions_of, is_own_namespace
from elastic.train.own_code import attributes, attributes_of, rewritten_attributes
from elastic.train.patched import Patch, Target, patches, targets
from elastic.train.set_first import read_after_loop, set_first
from elastic.train.step_functions import StepFunctions
from elastic.train.torch_calls import functions_called_by
from elastic.train.words import as_built_in

MANY_OBJECTS = 5_000
MANY_ITEMS = 1000  # of one container
DEPTH = 6
TOKEN_DEPTH, FEW_ITEMS = 2, 32  # of what tells that an analysis still holds

Named = list[tuple[str, Any]]
_REFERENCES = 3  # to that dict, by its frame, by the variable that names it, and by the call that counts
_HOOKS_OF_MODULES = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_NO_FUNCTIONS = bool, int, float, str, bytes, type(None), Tensor, np.ndarray
_KEEPS_A_COPY = sys.version_info < (3, 13)  # a frame keeps the dict that its f_locals gave


@dataclass(slots=True, kw_only=True)
class LoopVariables:
    """Names with their values, at the beginning of a pass.

    carried: one pass hands them on to the next. in_some: written in some passes, and by nothing
    else. targets: of the `for` itself, beside the step. after_loop: written in each pass, and read
    after the loop.
    assigned: attributes that functions of the loop assign. rewritten: those that a line of theirs
    makes from what they were, or that they assign in some calls or passes alone. cells: the
    variables of its frames. read_by_functions: the names that functions read which the script
    names. read_by_loading: variables that code which loads samples reads, and attributes, with a
    dot before them. iterated: variables and attributes that the loop or its functions iterate.
    patches: attributes of modules and classes that the loop assigns. set_first: the paths of those
    that each pass sets before anything reads them, and that nothing reads after the loop.
    """

    carried: Named = field(default_factory=list)
    in_some: Named = field(default_factory=list)
    targets: Named = field(default_factory=list)
    after_loop: list[str] = field(default_factory=list)
    assigned: set[str] = field(default_factory=set)
    rewritten: set[str] = field(default_factory=set)
    cells: set[tuple[str, int]] = field(default_factory=set)
    read_by_functions: set[str] = field(default_factory=set)
    read_by_loading: set[str] = field(default_factory=set)
    iterated: set[str] = field(default_factory=set)
    patches: list[Patch] = field(default_factory=list)
    set_first: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What loads samples. called: what may be, or hold, its functions. is_ahead: in processes."""

    called: tuple[Any, ...] = ()
    is_ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Analysis:
    """Which variables are live at a place in the code, as long as they name what they named.

    spaces: of the modules whose variables were looked at. named: for each variable what stood for
    the functions that it names. unset: global variables that functions read and that had no value.
    targets: what functions assign, by the module whose variables they name.
    """

    live: Live
    assigned: frozenset[str]
    rewritten: frozenset[str]
    iterated: frozenset[str]
    read_by_functions: frozenset[str]
    read_by_loading: frozenset[Variable]
    attributes_of_loading: frozenset[str]
    attributes_after_loop: frozenset[str]
    targets: dict[str, frozenset[Target]]
    spaces: dict[str, dict[str, Any]]
    named: dict[Variable, object]
    unset: set[Variable]

    def fits(self, names: "_Names") -> bool:
        return all(names.stands_for(each) == it for each, it in self.named.items()) and not any(
            each.name in self.spaces[each.module] for each in self.unset
        )


Analyses = dict[tuple[CodeType, int], _Analysis]


def loop_variables(
    frame: FrameType | None, known: Analyses | None = None, loading: Loading | None = None
) -> LoopVariables:
    """frame: that which asked for the next step, or one that it called.

    known: the analyses of former looks, which are used again unless a function has changed that a
    variable names, or that lies two levels deep in what it names. It gets those that are new.
    """
    found, known = LoopVariables(), {} if known is None else known
    frames = list[FrameType]()
    while frame is not None:
        frames += [frame] if is_own_file(frame.f_code.co_filename) else []
        frame = frame.f_back
    running = frozenset(each.f_code for each in frames)
    for each in frames:
        _add(found, each, running, known, loading or Loading())
    if frames and (analysis := known.get((frames[0].f_code, frames[0].f_lasti))) is not None:
        found.set_first = _set_first(frames, analysis, found)
    return found


def _set_first(frames: list[FrameType], analysis: _Analysis, found: LoopVariables) -> set[str]:
    """frames: the one that iterates the steps first. Code of the others runs after its loop."""
    code, offset = frames[0].f_code, frames[0].f_lasti
    names, own = Counter(name for name, _ in found.carried), _Names(frames[0], frozenset(), Loading())
    given = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_freevars}
    written, at_end = names_in_loop(code, offset).written, {each.name for each in analysis.live.at_end}
    read = analysis.attributes_after_loop | read_after_loop(code, offset)
    read = read.union(*(attributes(each.f_code, is_whole=False)[0] for each in frames[1:]))
    is_function = bool(code.co_flags & CO_OPTIMIZED)
    space = ChainMap(own.own, frames[0].f_globals)
    return {
        f"{variable}.{attribute}"
        for variable, attribute in set_first(code, offset, space)
        if names[variable] == 1
        and variable not in (given | written | at_end)
        and attribute not in read
        and (not is_function or variable in own.own)
        and not {variable, f".{attribute}"} & found.read_by_loading
    }


def _add(
    found: LoopVariables, frame: FrameType, running: frozenset[CodeType], known: Analyses, loading: Loading
) -> None:
    """running: the code of all frames; a pass goes on in them, and does not call it."""
    names, place = _Names(frame, running, loading), (frame.f_code, frame.f_lasti)
    found.cells |= {(name, id(value)) for name, value in names.own.items()}
    analysis = known.get(place)
    if analysis is not None:
        names.spaces = analysis.spaces | names.spaces
    if analysis is None or not analysis.fits(names):
        analysis = known[place] = names.analysis(*place)
    live = analysis.live
    found.carried += names.values(live.carried)
    found.in_some += names.values(live.in_some)
    found.targets += names.values(live.targets)
    found.after_loop += sorted(each.name for each in live.after_loop)
    found.assigned |= attributes(frame.f_code, is_whole=False)[1] | analysis.assigned
    kept = carried_attributes(*place)
    found.rewritten |= rewritten_attributes(frame.f_code) | kept | analysis.rewritten
    found.iterated |= iterated(frame.f_code) | analysis.iterated
    found.read_by_functions |= analysis.read_by_functions
    found.read_by_loading |= {name for name, _ in names.values(analysis.read_by_loading)}
    found.read_by_loading |= {f".{name}" for name in analysis.attributes_of_loading}
    assigned = {names.module: targets(frame.f_code)}, analysis.targets
    for module, those in chain.from_iterable(map(dict.items, assigned)):
        found.patches += patches(those, ChainMap(names.own, names.spaces[module]))


class _Names:
    """What the variables of one frame stand for."""

    def __init__(self, frame: FrameType, running: frozenset[CodeType], loading: Loading) -> None:
        self._running = running
        self._loading = loading
        self.module = str(frame.f_globals.get("__name__", ""))
        self.own: dict[str, Any] = {}
        self.assigned: set[str] = set()
        self.rewritten: set[str] = set()
        self._functions: dict[CodeType, set[str]] = {}  # with the names that they are called by
        self.targets: dict[str, frozenset[Target]] = {}
        if frame.f_code.co_flags & CO_OPTIMIZED:
            seen = frame.f_locals
            is_recipes = sys.getrefcount(seen) > _REFERENCES
            self.own = dict(seen)
            for name in (name for name, value in self.own.items() if value is seen):
                raise UsageError(_of_locals(name, frame.f_code.co_name))
            if _KEEPS_A_COPY and not is_recipes:
                seen.clear()  # lest the frame keep alive what its variables no longer name
        self.spaces = {self.module: frame.f_globals, "": self.own, IMPORTS: sys.modules}
        self._mentioned: dict[Variable, tuple[Variable, ...]] = {}
        self._reads: dict[Variable, tuple[Variable, ...]] = {}
        self._unset: set[Variable] = set()

    def analysis(self, code: CodeType, offset: int) -> _Analysis:
        live, of_loading = live_after(code, offset, self.module, self.mentions), self.mentions(LOADING)
        if self._loading.is_ahead:
            live = replace(live, carried=live.carried.union(of_loading))
        seen = {*self._mentioned, *chain.from_iterable(self._mentioned.values())}
        return _Analysis(
            live=live,
            assigned=frozenset(self.assigned),
            rewritten=frozenset(self.rewritten),
            iterated=handed_on(self._functions, code),
            read_by_functions=frozenset(self.read_by_functions),
            read_by_loading=frozenset(of_loading),
            attributes_of_loading=self._attributes_read((LOADING, *of_loading)),
            attributes_after_loop=self._attributes_read(live.at_end),
            targets=self.targets,
            spaces={name: space for name, space in self.spaces.items() if name},
            named={each: self.stands_for(each) for each in seen},
            unset=self._unset,
        )

    def stands_for(self, variable: Variable) -> object:
        """A token that is another one where the variable names other functions."""
        return _token(self._value(variable), TOKEN_DEPTH)

    def _value(self, variable: Variable) -> Any:
        if variable == LOADING:
            return self._loading.called
        found = self.spaces.get(variable.module, {}).get(variable.name)
        # What stands behind a proxy cannot be looked at, and one of nothing raises an error.
        return None if issubclass(type(found), ProxyTypes) else found

    def values(self, variables: Iterable[Variable]) -> Named:
        found = []
        for each in sorted(variables):
            space = self.spaces.get(each.module, {})
            if each.module == IMPORTS and not is_own_namespace(space.get(each.name)):
                continue
            is_proxy = issubclass(type(space.get(each.name)), ProxyTypes)
            if each.name in space and not each.name.startswith("__") and not is_proxy:
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
                one = left.pop()
                reads = self._reads.get(one)
                if reads is None:
                    reads = self._reads[one] = tuple(self._read_by(one))
                for each in reads:
                    if each not in seen:
                        seen.add(each)
                        left.append(each)
            if variable == LOADING:
                seen -= self._written_by_loading(seen)
            known = self._mentioned[variable] = tuple(seen)
        return known

    def _written_by_loading(self, read: set[Variable]) -> set[Variable]:
        """Caches and scratch space of the code that loads samples, which no loop changes."""
        functions = (each for one in (LOADING, *read) for each in functions_in(self._value(one)))
        written = frozenset[str]().union(*(written_variables(each.__code__) for each in functions))
        return {each for each in read if each.name in written}

    def _attributes_read(self, variables: Iterable[Variable]) -> frozenset[str]:
        functions = (each for one in variables for each in functions_in(self._value(one)))
        return frozenset[str]().union(*(attributes(each.__code__)[0] for each in functions))

    @property
    def read_by_functions(self) -> set[str]:
        return {each.name for mentioned in self._mentioned.values() for each in mentioned}

    def _read_by(self, variable: Variable) -> Iterator[Variable]:
        value = self._value(variable)
        if is_wrapper(value):
            self.assigned |= frozenset().union(
                *(attributes(each.__code__)[1] for each in unwrapped(value) if _is_own(each))
            )
        for function in functions_in(value):
            code = function.__code__
            self._functions.setdefault(code, set()).update((code.co_name, variable.name))
            self.rewritten |= rewritten_attributes(code)
            self.rewritten |= kept_attributes(code) if code not in self._running else frozenset()
            if variable != LOADING and computes(code):
                yield LOADING
            space = function.__globals__
            module = str(space.get("__name__", ""))
            self.spaces.setdefault(module, space)
            if assigned := targets(function.__code__):
                self.targets[module] = self.targets.get(module, frozenset()) | assigned
            for name in globals_needed(function.__code__):
                if name not in space and not hasattr(builtins, name):
                    self._unset.add(Variable(module, name))
                if name in space and _counts(space[name]):
                    yield Variable(module, name)
            yield from (Variable(IMPORTS, name) for name in imported(code))
            for name in function.__code__.co_freevars:
                if name in self.own:
                    yield Variable("", name)


def _token(value: Any, depth: int) -> object:
    """None for what can hold no functions. Functions of the same code and contents are the same."""
    if issubclass(type(value), (*_NO_FUNCTIONS, *ProxyTypes)):  # `isinstance` asks some objects
        return None
    head: object = id(value)
    held: Iterable[Any] = ()
    if issubclass(type(value), dict):
        head, held = dict, dict.values(value)
    elif issubclass(type(value), (list, tuple, deque)):
        head, held = list, as_built_in(value)
    elif isinstance(value, FunctionType):
        head, held = value.__code__, (each for _, each in bound_by(value))
    elif is_wrapper(value):
        head, held = type(value), (*wrapped_by(value), *(each for _, each in bound_by(value)))
    elif is_own_class(type(value)):
        held = (each for _, each in attributes_of(value))
    tokens = [_token(each, depth - 1) for each in islice(held, FEW_ITEMS)] if depth else ()
    return head, *filter(None, tokens)


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions of the recipe's own that a use of this value may run.

    They are those that it wraps, binds or holds in containers and attributes, and all methods of an
    object of a class of the recipe's own. Those that left_out_code.py has are none.
    """
    seen: dict[int, Any] = {}  # by id; kept, so that no other object gets it
    waiting = deque([(value, DEPTH)])
    while waiting and len(seen) < MANY_OBJECTS:
        thing, depth = waiting.popleft()
        kind = type(thing)  # `isinstance` asks an object of a class that has a `__class__`
        if id(thing) in seen or issubclass(kind, (*_NO_FUNCTIONS, *ProxyTypes, StepFunctions)):
            continue
        seen[id(thing)] = thing
        if kind is FunctionType and is_left_out(thing.__code__):
            continue
        if kind is FunctionType and _is_own(thing):
            yield thing
        if depth:
            # What raises an error where it is asked is named by the look at it.
            with suppress(Exception):
                waiting.extend((part, depth - 1) for part in _parts(thing))


def _parts(thing: Any) -> Iterator[Any]:
    """What may be, or hold, functions that a use of this runs."""
    if isinstance(thing, dict):
        if not dict.__contains__(thing, "__builtins__"):  # else it is what globals() gives
            yield from islice(dict.values(thing), MANY_ITEMS)
        return
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        yield from islice(as_built_in(thing), MANY_ITEMS)
        return
    if isinstance(thing, (type, ModuleType)):
        yield from functions_of(thing) if is_own_namespace(thing) else ()
        return
    yield from wrapped_by(thing)
    if is_wrapper(thing):
        for _, bound in bound_by(thing):
            yield bound
        return
    modules = structure.submodules([thing]) if isinstance(thing, nn.Module) else []
    for module in modules:
        space = vars(module)
        yield from (space[name] for name in _HOOKS_OF_MODULES if space.get(name))
        yield from functions_called_by(module)
    if isinstance(thing, (Optimizer, LRScheduler)):
        yield from functions_called_by(thing)
    elif not modules and is_own_class(type(thing)):
        yield from (held for _, held in attributes_of(thing))
    kinds = {id(each): each for held in modules or [thing] for each in type(held).__mro__}
    for each in filter(is_own_class, kinds.values()):
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
