"""What a dataset and its collate hold before samples are loaded, so that it can be put back.

Noted are numbers, tensors and containers in attributes of the dataset, of datasets in it, of
objects of the recipe's classes that hang on them, and of their classes; the rows of the samples in
tensors, arrays and lists; caches of functools; and what the functions of these classes, and
collate, read or assign as variables: global ones, those of a closure, defaults of parameters.

It does not note what objects of libraries hold, nor files and containers of more than 2**17 items.
"""

import dis
from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from copy import copy
from functools import _lru_cache_wrapper, partial
from itertools import zip_longest
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from elastic.data.attributes import has_space, space_of
from elastic.data.contents import is_array
from elastic.data.fingerprint import fingerprint
from elastic.data.own_files import is_own_class, is_own_file

_CONTAINERS = dict, list, set, deque, OrderedDict, defaultdict
_NUMBERS = bool, int, float
_MOST_ITEMS = 1 << 17  # of a container
_MOST_BYTES = 1 << 20  # of a row
_DEPTH = 4
_NOTHING = object()
_ASSIGNING = "STORE_GLOBAL", "STORE_DEREF"


class _Container(NamedTuple):
    name: str
    value: Any
    before: Any  # a copy


class _Number(NamedTuple):
    """Of a tensor or an array, that it is replaced. before: _NOTHING where there was none."""

    name: str
    before: Any
    read: Callable[[], Any]
    write: Callable[[Any], None]

    @property
    def is_another(self) -> bool:
        now = self.read()
        if self.before is None:  # what is made at the first use is no number
            return type(now) in _NUMBERS
        if type(self.before) in _NUMBERS and type(now) is type(self.before):
            return bool(now != self.before)
        return now is not self.before


class LoadingMemory:
    """samples: of the dataset, those that are about to be loaded."""

    def __init__(self, dataset: Any, samples: list[int], collate: Any) -> None:
        self._containers: list[_Container] = []
        self._rows: list[tuple[str, Any, Any]] = []  # name, view of a tensor or an array, copy
        self._versions: list[tuple[str, Tensor, int]] = []
        self._numbers: list[_Number] = []
        self._calls: list[tuple[str, Any, int]] = []  # name, function with a cache, size
        self._seen: set[int] = set()  # ids of objects
        self._functions: set[FunctionType] = set()  # whose variables are noted
        for sample in samples:
            for thing, name, number in _datasets(dataset, "dataset", sample, 0):
                if id(thing) not in self._seen:
                    self._note_with_parts(thing, name)
                for attribute, value in space_of(thing).items():
                    self._note_row(value, f"{name}.{attribute}", number)
        self._note_collate(collate)

    def changed(self) -> list[str]:
        """The names of what was written to, data first."""
        found = [name for name, tensor, version in self._versions if tensor._version != version]  # noqa: SLF001
        found += [name for name, row, before in self._rows if fingerprint(row) != fingerprint(before)]
        found += [each.name for each in self._containers if _new(each.value, each.before)]
        found += [each.name for each in self._numbers if each.is_another]
        found += [name for name, call, size in self._calls if call.cache_info().currsize != size]
        return list(dict.fromkeys(found))

    def is_number(self, name: str) -> bool:
        return any(each.name == name and not is_array(each.before) for each in self._numbers)

    def put_back(self, *, but: str = "") -> None:
        """All but what is no data, such as files that were opened, and what has this name."""
        for name, row, before in self._rows:
            if name != but and fingerprint(row) != fingerprint(before):
                with torch.no_grad():
                    row[...] = before
        for name, value, before in self._containers:
            new = [] if name == but else _new(value, before)
            if new and all(map(_is_data, new)):
                value.clear()
                (value.update if isinstance(value, dict | set) else value.extend)(before)
        for each in self._numbers:
            if each.name != but and each.is_another:
                each.write(each.before)
        for name, call, _ in self._calls:
            if name != but:
                call.cache_clear()

    def _note_collate(self, collate: Any) -> None:
        """What it, or the object that it is a method of, has as attributes."""
        function = getattr(collate, "func", collate)  # of a partial
        holder = getattr(function, "__self__", function)
        if has_space(holder) and not isinstance(holder, type | ModuleType):
            self._note_with_parts(holder, "collate" if holder is function else type(holder).__name__)
        self._note_variables(getattr(function, "__func__", function), "collate's")

    def _note_with_parts(self, thing: Any, name: str) -> None:
        self._seen.add(id(thing))
        for part, place in ((thing, name), *_parts(thing, name, self._seen, 0)):
            self._note(part, place)
            for kind in type(part).__mro__:
                for made in vars(kind).values() if is_own_class(kind) else ():
                    self._note_variables(getattr(made, "__wrapped__", made), f"{name}'s")

    def _note(self, thing: Any, name: str) -> None:
        space = space_of(thing)
        for attribute, value in space.items():
            place = f"{name}.{attribute}"
            self._note_value(place, value, partial(space.get, attribute), partial(_set, space, attribute))
            if is_array(value) and isinstance(value, Tensor) and not value.is_inference():
                self._versions.append((place, value, value._version))  # noqa: SLF001
        for kind in type(thing).__mro__:
            for attribute, value in vars(kind).items() if is_own_class(kind) else ():
                if type(value) in _NUMBERS and not attribute.startswith("__"):
                    place = f"{name}.{attribute}"
                    of_class = partial(getattr, kind, attribute), partial(type.__setattr__, kind, attribute)
                    self._numbers.append(_Number(place, value, *of_class))
                    if attribute not in space:  # `self.count += 1` makes it
                        of_thing = partial(space.get, attribute, _NOTHING), partial(_set, space, attribute)
                        self._numbers.append(_Number(place, _NOTHING, *of_thing))
                elif isinstance(value, _lru_cache_wrapper):
                    size = value.cache_info().currsize
                    self._calls.append((f"{kind.__name__}.{attribute}", value, size))

    def _note_variables(self, function: Any, whose: str) -> None:
        """What a function of the recipe, and those that it calls by a name, read or assign."""
        is_own = isinstance(function, FunctionType) and is_own_file(function.__code__.co_filename)
        if not is_own or function in self._functions:
            return
        self._functions.add(function)
        known = function.__globals__
        names, assigned = _names(function.__code__)
        for name in sorted(names & known.keys()):
            if name in assigned or type(known[name]) in _CONTAINERS:
                places = partial(known.get, name), partial(known.__setitem__, name)
                self._note_value(f"{whose} {name}", known[name], *places)
            self._note_variables(known[name], whose)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is empty
                places = partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents")
                self._note_value(f"{whose} {name}", cell.cell_contents, *places)
                self._note_variables(cell.cell_contents, whose)
        for name, value in _defaults(function).items():
            self._note_container(f"{whose} {name}", value)

    def _note_value(
        self, name: str, value: Any, read: Callable[[], Any], write: Callable[[Any], None]
    ) -> None:
        self._note_container(name, value)
        if value is None or type(value) in _NUMBERS or is_array(value):
            self._numbers.append(_Number(name, value, read, write))

    def _note_container(self, name: str, value: Any) -> None:
        if type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS:
            self._containers.append(_Container(name, value, copy(value)))

    def _note_row(self, value: Any, name: str, number: int) -> None:
        """The sample's row of a tensor or an array, or the one in its place of a list."""
        if type(value) in (list, tuple) and number < len(value):
            row = value[number]
        elif is_array(value) and value.ndim and number < len(value):
            row = value[number : number + 1]
        else:
            return
        if is_array(row) and row.nbytes <= _MOST_BYTES:
            self._rows.append((name, row, row.clone() if isinstance(row, Tensor) else row.copy()))


def _set(space: MutableMapping[str, Any], key: str, value: Any) -> None:
    if value is _NOTHING:
        space.pop(key, None)
    else:
        space[key] = value


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """Those of variables that it and the functions made in it read, and those that they assign."""
    read, assigned = {*code.co_names, *code.co_freevars}, set[str]()
    for each in dis.get_instructions(code):
        if each.opname in _ASSIGNING:
            assigned.add(str(each.argval))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, others = _names(inner)
            read |= more
            assigned |= others
    return read | assigned, assigned


def _defaults(function: FunctionType) -> dict[str, Any]:
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    return {
        **dict(zip(names[len(names) - len(given) :], given, strict=True)),
        **(function.__kwdefaults__ or {}),
    }


def _new(value: Any, before: Any) -> list[Any]:
    """What stands in a container, or stood there, and did not before, or does not any more."""
    if isinstance(value, set):
        return list(value ^ before)
    if isinstance(value, dict):
        return [
            one if one is not _NOTHING else other
            for key in {**value, **before}
            if (one := value.get(key, _NOTHING)) is not (other := before.get(key, _NOTHING))
        ]
    pairs = zip_longest(value, before, fillvalue=_NOTHING)
    return [other if one is _NOTHING else one for one, other in pairs if one is not other]


def _is_data(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    return value is None or isinstance(
        value, Tensor | np.ndarray | np.generic | complex | float | int | str | bytes
    )


def _parts(thing: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[Any, str]]:
    """What hangs on a dataset and is of a class of the recipe's: transforms, and what is in them.

    Another one's object (a file that was opened) may depend on more than its attributes.
    """
    held = list(space_of(thing).items())
    if isinstance(getattr(thing, "transforms", None), list):  # as of torchvision's Compose
        held += [(f"transforms[{number}]", each) for number, each in enumerate(thing.transforms)]
    for attribute, value in held:
        is_new = id(value) not in seen and has_space(value) and not isinstance(value, Dataset)
        if not is_new or depth >= _DEPTH:
            continue
        seen.add(id(value))
        place = f"{name}.{attribute}"
        if is_own_class(type(value)):
            yield value, place
        if is_own_class(type(value)) or hasattr(value, "transforms"):
            yield from _parts(value, place, seen, depth + 1)


def _datasets(thing: Any, name: str, number: int, depth: int) -> Iterator[tuple[Any, str, int]]:
    """Each dataset that has attributes, with its name and the sample's number in it."""
    held = space_of(thing)
    if not has_space(thing) or depth > _DEPTH:
        return
    yield thing, name, number
    if isinstance(thing, Subset):
        inner = int(thing.indices[number]) if number < len(thing.indices) else number
        yield from _datasets(thing.dataset, f"{name}.dataset", inner, depth + 1)
    elif isinstance(thing, ConcatDataset):
        part = bisect_right(thing.cumulative_sizes, number)
        first = thing.cumulative_sizes[part - 1] if part else 0
        for each in thing.datasets[part : part + 1]:
            yield from _datasets(each, f"{name}.datasets[{part}]", number - first, depth + 1)
    else:
        for attribute, value in list(held.items()):
            if isinstance(value, Dataset):
                yield from _datasets(value, f"{name}.{attribute}", number, depth + 1)
