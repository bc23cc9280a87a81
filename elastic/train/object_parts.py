"""What hangs on one object, part by part, each with the rules under which it is marked.

The rules say what a change of the part means (object_marks.py): another tensor in an attribute that
no line makes from the former one may be scratch space, and another number what is only shown. No
code of the recipe's runs.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from types import BuiltinFunctionType, FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic.data.own_files import is_own_file
from elastic.train.callables import unwrapped, wrapped_by
from elastic.train.iterator_places import iterators_in, passes_on
from elastic.train.liveness import globals_needed
from elastic.train.namespaces import data_of, own_classes, rewritten_in
from elastic.train.object_marks import Kind, Mark, Rules, Weight
from elastic.train.own_code import attributes_of, cell_contents, updated_attributes
from elastic.train.words import PLAIN

FREE = Rules(rebound=Weight.REFUSED, in_place=Weight.REFUSED, plain=Weight.SAID)
STRICT = replace(FREE, plain=Weight.REFUSED)

FEW_ITEMS = 32

_OF_LIBRARIES = Tensor, np.ndarray, np.random.Generator, np.random.RandomState, torch.Generator
_CACHED = type(functools.cache(id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    path: str
    thing: Any
    rules: Rules
    owner: str
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    path: str
    rules: Rules
    owner: str
    entry: str
    depth: int

    def part(self, form: str, path: str, thing: Any, name: Any = "") -> Part:
        written = form.format(path, name if isinstance(name, (str, int)) else type(name).__name__)
        return Part(path=written, thing=thing, rules=self.rules, owner=self.owner, depth=self.depth)


def of_tensor(thing: Tensor, place: Place, rewritten: frozenset[str]) -> Iterator[Part]:
    """Attributes that a recipe gives it. Another tensor there may be set in each step first."""
    for name, value in attributes_of(thing):
        is_rewritten = name in rewritten
        its = place.rules if is_rewritten else replace(place.rules, rebound=Weight.SAID)
        yield replace(place.part("{}.{}", place.path, value, name), rules=its, owner="tensor")


def of_function(thing: FunctionType, place: Place, cells: frozenset[tuple[str, int]]) -> Iterator[Part]:
    """cells: variables of the loop's frames, which it does not carry by itself."""
    for each in wrapped_by(thing):
        yield place.part("{}", place.path, each)
    if not is_own_file(thing.__code__.co_filename):
        return
    names = thing.__code__.co_freevars
    for name, cell in zip(names, thing.__closure__ or (), strict=False):
        for value in cell_contents(cell):
            if (name, id(value)) in cells:
                continue
            yield replace(place.part("{}", place.path, value), path=name)
    for name, value in _defaults(thing):
        yield place.part("{}({})", place.path, value, name)
    for name, value in vars(thing).items():
        if not name.startswith("__"):
            yield place.part("{}.{}", place.path, value, name)


def of_iterator(thing: Any, place: Place) -> Iterable[Part] | None:
    """All that an iterator holds counts as its place. None for one that gives the run's steps."""
    held: dict[str, Any] = {}
    if isinstance(thing, GeneratorType):
        frame = thing.gi_frame
        if frame is None or not is_own_file(frame.f_code.co_filename):
            return ()
        held = {f"{place.path} (its {name})": value for name, value in frame.f_locals.items()}
    inner = iterators_in(thing)
    if any(_gives_steps(each) for each in (thing, *inner)):
        return None
    parts = []
    numbered = enumerate(inner)
    paths = {
        place.path if number == 0 else f"{place.path} (its part {number})": each for number, each in numbered
    }
    for path, each in (paths | held).items():
        if not isinstance(each, (FunctionType, ModuleType, type, nn.Module)):
            part = place.part("{}", path, each)
            parts.append(replace(part, rules=STRICT, owner="iterator"))
    return parts


def of_namespace(
    space: Any, place: Place, *, assigned: frozenset[str], rewritten: frozenset[str]
) -> Iterator[Part]:
    """Of a class or module. Another tensor there may be set in each step before a read."""
    name = space.__name__.rpartition(".")[2]
    rewritten = rewritten | rewritten_in(space)
    for key, value in data_of(space):
        its = place.rules
        if key not in rewritten:
            its = replace(its, rebound=min(its.rebound, Weight.SAID))
        owner = "namespace" if key in assigned else ""
        yield replace(place.part("{}.{}", name, value, key), rules=its, owner=owner)
    if isinstance(space, type):
        for base in space.__bases__:
            yield place.part("{}", base.__name__, base)
        for meta in own_classes(space):  # `CFG.n += 1` may set what a metaclass keeps
            yield place.part("{}", meta.__name__, meta)


def of_own(thing: Any, place: Place, rewritten: frozenset[str]) -> Iterator[Part]:
    """Of an object of the recipe's own. A schedule has an optimizer and no module."""
    held = list(attributes_of(thing))
    is_schedule = any(isinstance(value, Optimizer) for _, value in held)
    is_schedule = is_schedule and not any(isinstance(value, nn.Module) for _, value in held)
    updated = updated_attributes(type(thing))
    for name, value in held:
        rules = place.rules
        if name in updated and is_schedule:
            rules = replace(rules, plain=rules.in_place)
        # A single tensor that some calls set may be read right after them, unlike weights.
        elif name not in updated and (name not in rewritten or isinstance(value, Tensor)):
            rules = replace(rules, rebound=min(rules.rebound, Weight.SAID))
        owner = "schedule" if is_schedule else "object"
        yield replace(place.part("{}.{}", place.path, value, name), rules=rules, owner=owner)
    for kind in own_classes(thing):
        yield place.part("{}", kind.__name__, kind)


def of_library(thing: Any, place: Place, assigned: frozenset[str]) -> Iterator[Part]:
    """Arrays, tensors and generators of random numbers that an object of another library has.

    A scaler, cluster centres, a sampler of SciPy's, the lists of a sparse matrix. assigned:
    attributes that the code of the loop assigns. Their numbers count as well; what the library
    counts for itself, such as the length of a progress bar, does not.
    """
    for name, value in attributes_of(thing):
        if isinstance(value, _OF_LIBRARIES) or (name in assigned and type(value) in PLAIN):
            its = place.rules.at_most(Weight.SAID)
            depth = 2 if isinstance(value, np.ndarray) and value.dtype.hasobject else 0  # lists of numbers
            yield replace(place.part("{}.{}", place.path, value, name), rules=its, depth=depth)


def holds_tensors(item: Any) -> bool:
    """Whether an item of a container is one, or holds some directly, as a state_dict does."""
    if isinstance(item, (Tensor, nn.Module)):
        return True
    held: Iterable[Any] = ()
    if isinstance(item, dict):
        held = dict.values(item)
    elif isinstance(item, (list, tuple)):
        held = item
    return any(isinstance(each, Tensor) for each in islice(held, FEW_ITEMS))


def mark_of_cache(thing: Any, place: Place) -> Mark | None:
    """Of one of functools: how often it was filled. What is in it no one can read."""
    if not isinstance(thing, _CACHED):
        return None
    owner = "cache by key" if all(map(_is_by_arguments, unwrapped(thing))) else "dict"
    value = thing.cache_info().misses, ()
    return Mark(kind=Kind.PLAIN, value=value, rules=place.rules, owner=owner, entry=place.entry)


def _is_by_arguments(function: FunctionType) -> bool:
    """Whether what it gives follows from its arguments: beside them it reads only code."""
    space = function.__globals__
    read = [space[name] for name in globals_needed(function.__code__) if name in space]
    is_code = all(isinstance(each, (ModuleType, type, FunctionType, BuiltinFunctionType)) for each in read)
    return is_code and not function.__closure__


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What its parameters have without an argument, by their names."""
    code, given = function.__code__, function.__defaults__ or ()
    last = code.co_argcount
    yield from zip(code.co_varnames[last - len(given) : last], given, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _gives_steps(thing: Any) -> bool:
    """Whether it is the iterator over the run's steps, or passes on what that gives."""
    if isinstance(thing, GeneratorType):
        frame = thing.gi_frame
        return thing.gi_running or (frame is not None and not is_own_file(frame.f_code.co_filename))
    return passes_on(thing) and any(_gives_steps(each) for each in iterators_in(thing) if passes_on(each))
