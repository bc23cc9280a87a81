"""From a few names to the marks of all that hangs on them: bounded, and without the recipe's code.

It follows containers, the attributes of objects of the recipe's own classes and of torch's, those
of the recipe's classes and modules (namespaces.py), what functions close over and have for
defaults, and iterators. It looks at attributes in `vars` and slots alone: no property, comparison
or `__getattr__` of the recipe's runs. What the State saves is left out, and so are this library's
objects and files. Of objects of other libraries without a state_dict it sees the arrays and tensors
in their own attributes.
"""

import functools
import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic.train.callables import is_wrapper, unwrapped, wrapped_by
from elastic.train.liveness import globals_needed
from elastic.train.namespaces import data_of, is_own_namespace, own_classes, rewritten_in
from elastic.train.object_contents import opened
from elastic.train.object_marks import PLAIN, Kind, Mark, Rules, Weight, mark_of, passes_on, storage_of
from elastic.train.own_code import (
    attributes_of,
    cell_contents,
    is_own_class,
    is_own_file,
    updated_attributes,
)
from elastic.train.values import Values

MANY_OBJECTS = 50_000
MANY_ITEMS = 1000  # of one container
DEPTH = 8

FREE = Rules(rebound=Weight.REFUSED, in_place=Weight.REFUSED, plain=Weight.SAID)
STRICT = replace(FREE, plain=Weight.REFUSED)
_OUTPUT = Rules(rebound=Weight.NONE, in_place=Weight.REFUSED, plain=Weight.SAID)
_OF_LIBRARY = Rules(rebound=Weight.NONE, in_place=Weight.SAID, plain=Weight.NONE)

_MODULE_NAMES = frozenset(vars(nn.Module()))
_OPTIMIZER_NAMES = frozenset({"defaults", "state", "param_groups"})
_CHOSEN = nn.Module, Optimizer, LRScheduler
_CACHED = type(functools.cache(id))
_ITERATORS_OF_TORCH = torch.utils.data.dataloader._BaseDataLoaderIter  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Which object is in a place, as the value of its mark."""

    id: int


@dataclass(slots=True, kw_only=True)
class Walk:
    """One look at everything.

    saved: gives the addresses of the storages of the State's tensors; it is called where a tensor
    is met. left_out: ids of objects that are not entered. assigned: attributes that the code of the
    loop assigns. outputs: ids of containers that hooks of modules fill. cells: variables of the
    loop's frames, each with the id of its value, which the functions that close over them do not
    carry by themselves. rewritten: attributes that a line of the loop makes from what they were.
    """

    saved: Callable[[], set[int]]
    left_out: set[int]
    assigned: frozenset[str] = frozenset()
    outputs: frozenset[int] = frozenset()
    cells: frozenset[tuple[str, int]] = frozenset()
    rewritten: frozenset[str] = frozenset()
    marks: dict[str, Mark] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)
    _objects: int = 0

    def enter(
        self, path: str, thing: Any, rules: Rules, *, owner: str = "", entry: str = "", depth: int = DEPTH
    ) -> None:
        """Mark an object, or what it holds, under this path."""
        if id(thing) in self.left_out or depth < 0:
            return
        mark = None if self._is_saved(thing) else mark_of(thing, rules, owner, entry)
        if mark is not None and mark.kind is Kind.PLAIN:
            self.marks.setdefault(path, mark)
            return
        if isinstance(thing, _CHOSEN):
            self._note_choice(path, thing, rules, owner, entry)
        if id(thing) in self._seen or self._objects > MANY_OBJECTS:
            return
        self._seen.add(id(thing))
        self._objects += 1
        if mark is not None:
            self.marks.setdefault(path, mark)
        place = _Place(path=path, rules=rules, owner=owner, entry=entry, depth=depth - 1)
        for part in self._parts(thing, place):
            self.enter(part.path, part.thing, part.rules, owner=part.owner, entry=entry, depth=part.depth)

    def module_of_state(self, path: str, module: nn.Module) -> None:
        """What its state_dict leaves out: plain attributes, and buffers that are not persistent."""
        for name, each in module.named_modules(prefix=path):
            self._seen.add(id(each))
            for buffer in each._non_persistent_buffers_set:  # noqa: SLF001
                value = each._buffers.get(buffer)  # noqa: SLF001
                is_updated = buffer in updated_attributes(type(each)) or buffer in self.assigned
                rules = FREE if is_updated else replace(FREE, rebound=Weight.SAID)
                self.enter(f"{name}.{buffer}", value, rules, owner="buffer", entry=path)
            self._attributes_of_module(name, each, entry=path)
            for key, tensor in (*each._parameters.items(), *each._buffers.items()):  # noqa: SLF001
                if tensor is not None:
                    place = _Place(path=f"{name}.{key}", rules=FREE, owner="", entry=path, depth=DEPTH)
                    for part in self._of_tensor(tensor, place):
                        self.enter(
                            part.path, part.thing, part.rules, owner="tensor", entry=path, depth=part.depth
                        )
            for kind in own_classes(each):  # their numbers are kept with the State
                self.enter(kind.__name__, kind, replace(FREE, plain=Weight.NONE))

    def optimizer_of_state(
        self, path: str, optimizer: Optimizer, rules: Rules = FREE, *, entry: str = ""
    ) -> None:
        """What its state_dict leaves out: plain attributes.

        entry: of one that has a state_dict of its own, which may leave out its state as well.
        """
        self._seen.add(id(optimizer))
        kept_by_torch = {"param_groups", "defaults"} if entry else _OPTIMIZER_NAMES
        for name, value in vars(optimizer).items():
            if name not in kept_by_torch and not name.endswith("_hooks"):
                its = rules if not name.startswith("_") else replace(rules, plain=Weight.NONE)
                self.enter(f"{path}.{name}", value, its, owner="optimizer", entry=entry)

    def _is_saved(self, thing: Any) -> bool:
        return isinstance(thing, Tensor) and storage_of(thing) in self.saved()

    def _parts(self, thing: Any, place: "_Place") -> Iterable["_Part"]:
        if isinstance(thing, (str, bytes, int, float, CodeType, FrameType)):
            return ()
        if isinstance(thing, (BuiltinFunctionType, MethodWrapperType)):  # random.Random(0).random
            bound = thing.__self__
            return (
                () if isinstance(bound, (ModuleType, type, Tensor)) else [place.part("{}", place.path, bound)]
            )
        if isinstance(thing, Tensor):
            return self._of_tensor(thing, place)
        if isinstance(thing, np.ndarray):
            numbered = enumerate(thing.flat) if thing.dtype.hasobject else ()
            return [place.part("{}[{}]", place.path, each, n) for n, each in islice(numbered, MANY_ITEMS)]
        if isinstance(thing, (type, ModuleType)):
            return self._of_namespace(thing, place) if is_own_namespace(thing) else ()
        if isinstance(thing, dict):
            return self._items(thing, place, dict.items(thing), "{}[{!r}]")
        if isinstance(thing, (list, tuple)):
            every = -(-len(thing) // MANY_ITEMS) or 1
            return self._items(
                thing, place, zip(range(0, len(thing), every), thing[::every], strict=True), "{}[{}]"
            )
        if isinstance(thing, deque):
            return self._items(thing, place, enumerate(thing), "{}[{}]")
        if isinstance(thing, (set, frozenset)):
            plain = (each for each in thing if type(each) in PLAIN)
            return self._items(thing, place, enumerate(plain), "{}[{}]")
        if passes_on(thing):
            return self._of_iterator(thing, place)
        if isinstance(thing, _ITERATORS_OF_TORCH):
            number = Mark(kind=Kind.ITERATOR, value=thing._num_yielded, rules=STRICT, owner=place.owner)  # noqa: SLF001
            self.marks.setdefault(place.path, number)
            return ()
        if isinstance(thing, torch.utils.data.DataLoader):
            held = (thing.generator, getattr(thing.sampler, "generator", None))
            return [place.part("{}.generator", place.path, each) for each in held if each is not None]
        if isinstance(thing, FunctionType):
            self._note_choice(place.path, thing.__code__, place.rules, place.owner, place.entry)
            return self._of_function(thing, place)
        if isinstance(thing, MethodType):
            function = thing.__func__
            chosen = getattr(function, "__code__", function)
            self._note_choice(place.path, chosen, place.rules, place.owner, place.entry)
            return [place.part("{}", place.path, thing.__self__)]
        if isinstance(thing, functools.partial):
            given = (
                place.part("{}.args", place.path, thing.args),
                place.part("{}.keywords", place.path, thing.keywords),
            )
            return [place.part("{}", place.path, thing.func), *given]
        if is_wrapper(thing) and not is_own_class(type(thing)):
            self._note_cache(thing, place)
            return [place.part("{}", place.path, each) for each in wrapped_by(thing)]
        if (contents := opened(thing)) is not None:
            return [place.part("{}{}", place.path, each, end) for end, each in contents]
        return self._of_instance(thing, place)

    def _items(
        self, thing: Any, place: "_Place", items: Iterable[tuple[Any, Any]], form: str
    ) -> Iterator["_Part"]:
        """A container's mark is its length and its numbers and words, of a large one a part."""
        rules = place.rules
        if id(thing) in self.outputs:
            rules = replace(_OUTPUT, plain=Weight.NONE)
        is_sequence = not isinstance(thing, (dict, set, frozenset))
        numbers, has_contents = list[Any](), False
        for count, (name, item) in enumerate(items):
            if count >= MANY_ITEMS:
                break
            if type(item) in (bool, int, float, str, type(None)):
                numbers.append(hash(item) if type(item) is str else item)
                continue
            has_contents = has_contents or isinstance(item, Tensor)
            yield replace(place, rules=rules).part(form, place.path, item, name)
        plain = rules.rebound if has_contents and is_sequence else rules.plain
        mark = Mark(
            kind=Kind.PLAIN,
            value=(len(thing), tuple(numbers)),
            rules=replace(rules, plain=plain),
            owner="list" if is_sequence else "dict",
            entry=place.entry,
        )
        self.marks.setdefault(place.path, mark)

    def _of_iterator(self, thing: Any, place: "_Place") -> Iterable["_Part"]:
        """All that an iterator holds counts as its place, but for the steps of the run."""
        held: list[Any] = []
        if isinstance(thing, GeneratorType):
            frame = thing.gi_frame
            if frame is None or not is_own_file(frame.f_code.co_filename):
                return ()
            held = list(frame.f_locals.values())
        inner = [each for each in gc.get_referents(thing) if _is_iterator(each)]
        if any(_gives_steps(each) for each in (thing, *inner)):
            self.marks.pop(place.path, None)
            return ()
        parts = []
        for number, each in enumerate([*inner, *held]):
            if isinstance(each, (FunctionType, ModuleType, type, nn.Module)):
                continue
            part = place.part("{}", place.path, each)
            name = place.path if number == 0 else f"{place.path} (its part {number})"
            parts.append(replace(part, path=name, rules=STRICT, owner="iterator"))
        return parts

    def _of_function(self, thing: FunctionType, place: "_Place") -> Iterator["_Part"]:
        for each in wrapped_by(thing):
            yield place.part("{}", place.path, each)
        if not is_own_file(thing.__code__.co_filename):
            return
        names = thing.__code__.co_freevars
        for name, cell in zip(names, thing.__closure__ or (), strict=False):
            for value in cell_contents(cell):
                if (name, id(value)) in self.cells:
                    continue
                yield replace(place.part("{}", place.path, value), path=name)
        for name, value in _defaults(thing):
            yield place.part("{}({})", place.path, value, name)
        for name, value in vars(thing).items():
            if not name.startswith("__"):
                yield place.part("{}.{}", place.path, value, name)

    def _of_tensor(self, thing: Tensor, place: "_Place") -> Iterator["_Part"]:
        """Attributes that a recipe gives it. Another tensor there may be set in each step first."""
        for name, value in attributes_of(thing):
            is_rewritten = name in self.rewritten
            its = place.rules if is_rewritten else replace(place.rules, rebound=Weight.SAID)
            yield replace(place.part("{}.{}", place.path, value, name), rules=its, owner="tensor")

    def note_which(self, path: str, thing: object) -> None:
        """Which object a variable names, where no mark says more."""
        known = self.marks.get(path)
        if known is None or (known.kind is Kind.PLAIN and isinstance(known.value, _Chosen)):
            self.marks[path] = Mark(kind=Kind.PLAIN, value=_Chosen(id(thing)), rules=FREE)

    def _note_choice(self, path: str, chosen: object, rules: Rules, owner: str, entry: str) -> None:
        """Which object or function is in a place: it may be another one later."""
        value = _Chosen(id(chosen))
        mark = Mark(kind=Kind.PLAIN, value=value, rules=rules, owner=owner, entry=entry)
        self.marks.setdefault(path, mark)

    def _note_cache(self, thing: Any, place: "_Place") -> None:
        """Of functools: how often it was filled. What is in it no one can read."""
        if isinstance(thing, _CACHED):
            value = thing.cache_info().misses, ()
            owner = "cache by key" if all(map(_is_by_arguments, unwrapped(thing))) else "dict"
            mark = Mark(kind=Kind.PLAIN, value=value, rules=place.rules, owner=owner, entry=place.entry)
            self.marks.setdefault(f"{place.path}.cache_info()", mark)

    def _of_namespace(self, space: Any, place: "_Place") -> Iterator["_Part"]:
        """Of a class or module. Another tensor there may be set in each step before a read."""
        name = space.__name__.rpartition(".")[2]
        rewritten = self.rewritten | rewritten_in(space)
        for key, value in data_of(space):
            its = place.rules
            if key not in rewritten:
                its = replace(its, rebound=min(its.rebound, Weight.SAID))
            owner = "namespace" if key in self.assigned else ""
            yield replace(place.part("{}.{}", name, value, key), rules=its, owner=owner)
        if isinstance(space, type):
            for base in space.__bases__:
                yield place.part("{}", base.__name__, base)

    def _of_instance(self, thing: Any, place: "_Place") -> Iterable["_Part"]:
        kind = type(thing)
        if kind is Values:
            return [
                replace(place.part("{}.{}", place.path, value, name), rules=STRICT, owner="values")
                for name, value in vars(thing).items()
            ]
        if kind.__module__.partition(".")[0] == "elastic":
            return ()
        if isinstance(thing, nn.Module):
            return self._of_module(thing, place)
        if isinstance(thing, Optimizer):
            held = ("state", thing.state), ("param_groups", thing.param_groups)
            return [
                replace(place.part("{}.{}", place.path, value, name), owner="module") for name, value in held
            ]
        if is_own_class(kind):
            self._note_choice(place.path, kind, place.rules, place.owner, place.entry)
            return self._attributes(thing, place)
        if isinstance(thing, torch.distributions.Distribution):
            return [place.part("{}.{}", place.path, value, name) for name, value in attributes_of(thing)]
        if hasattr(kind, "state_dict"):
            return (place.part("{}.{}", place.path, value, name) for name, value in attributes_of(thing))
        return self._of_library(thing, place)

    def _of_library(self, thing: Any, place: "_Place") -> Iterator["_Part"]:
        """Arrays and tensors that an object of another library has: a scaler, cluster centres."""
        for name, value in attributes_of(thing):
            if isinstance(value, (Tensor, np.ndarray)):
                its = place.rules.at_most(Weight.SAID)
                yield replace(place.part("{}.{}", place.path, value, name), rules=its, depth=0)

    def _of_module(self, module: nn.Module, place: "_Place") -> Iterator["_Part"]:
        for name, each in module.named_modules():
            path = f"{place.path}.{name}" if name else place.path
            self._seen.add(id(each))
            for key, tensor in (*each._parameters.items(), *each._buffers.items()):  # noqa: SLF001
                if tensor is not None:
                    yield replace(place.part("{}.{}", path, tensor, key), owner="module")
            self._attributes_of_module(path, each)
            for kind in own_classes(each):
                yield replace(place.part("{}", kind.__name__, kind), rules=FREE, owner="")

    def _attributes_of_module(self, path: str, module: nn.Module, entry: str = "") -> None:
        """A tensor that a forward leaves in an attribute is its output, and may be another one."""
        is_own = is_own_class(type(module))
        rules = _OUTPUT if is_own else _OF_LIBRARY
        for name, value in vars(module).items():
            is_mode = name == "training" and not entry
            if (name in _MODULE_NAMES and not is_mode) or (entry and _is_plain(value)):
                continue  # kept with the State
            if not isinstance(value, nn.Module):
                is_assigned = name in self.assigned and rules is _OUTPUT
                its = replace(rules, rebound=Weight.SAID) if is_assigned else rules
                its = replace(its, plain=Weight.SAID)  # a loss's beta, a list that the loop appends to
                self.enter(f"{path}.{name}", value, its, owner="attribute", entry=entry, depth=DEPTH // 2)

    def _attributes(self, thing: Any, place: "_Place") -> Iterator["_Part"]:
        """Of an object of the recipe's own. A schedule has an optimizer and no module."""
        held = list(attributes_of(thing))
        is_schedule = any(isinstance(value, Optimizer) for _, value in held)
        is_schedule = is_schedule and not any(isinstance(value, nn.Module) for _, value in held)
        updated = updated_attributes(type(thing))
        for name, value in held:
            rules = place.rules
            if name in updated and is_schedule:
                rules = replace(rules, plain=rules.in_place)
            elif name not in updated:
                rules = replace(rules, rebound=min(rules.rebound, Weight.SAID))
            owner = "schedule" if is_schedule else "object"
            yield replace(place.part("{}.{}", place.path, value, name), rules=rules, owner=owner)
        for kind in own_classes(thing):
            yield place.part("{}", kind.__name__, kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    path: str
    thing: Any
    rules: Rules
    owner: str
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    path: str
    rules: Rules
    owner: str
    entry: str
    depth: int

    def part(self, form: str, path: str, thing: Any, name: Any = "") -> _Part:
        written = form.format(path, name if isinstance(name, (str, int)) else type(name).__name__)
        return _Part(path=written, thing=thing, rules=self.rules, owner=self.owner, depth=self.depth)


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What its parameters have without an argument, by their names."""
    code, given = function.__code__, function.__defaults__ or ()
    last = code.co_argcount
    yield from zip(code.co_varnames[last - len(given) : last], given, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _is_by_arguments(function: FunctionType) -> bool:
    """Whether what it gives follows from its arguments: beside them it reads only code."""
    space = function.__globals__
    read = [space[name] for name in globals_needed(function.__code__) if name in space]
    is_code = all(isinstance(each, (ModuleType, type, FunctionType, BuiltinFunctionType)) for each in read)
    return is_code and not function.__closure__


def _is_plain(thing: Any) -> bool:
    """A number, a string, or a tuple of them alone."""
    return type(thing) in PLAIN or (type(thing) is tuple and all(type(each) in PLAIN for each in thing))


def _is_iterator(thing: Any) -> bool:
    return hasattr(type(thing), "__next__")


def _gives_steps(thing: Any) -> bool:
    """Whether it is the iterator over the run's steps, or passes on what that gives."""
    if isinstance(thing, GeneratorType):
        frame = thing.gi_frame
        return thing.gi_running or (frame is not None and not is_own_file(frame.f_code.co_filename))
    return passes_on(thing) and any(_gives_steps(each) for each in gc.get_referents(thing) if passes_on(each))
