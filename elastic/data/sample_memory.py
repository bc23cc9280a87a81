"""A dataset that remembers what it loaded is found before its first samples are trained.

A sample is a function of (seed, epoch, sample) alone, or else it depends on which samples a process
loaded before, and so on the number of workers. The first samples of a run are therefore loaded four
times, in this process: under their own random streams, under others, under their own again, and
under the others again after what the dataset keeps in memory was put back as it was at first. A
dataset that changes its data in place, or draws from a generator of its own, gives other samples
the third time; one that keeps samples with their augmentation gives others the fourth time. A cache
of what does not depend on random numbers passes.

It does not find what the first samples do not show, nor memories in files, in other processes, in
objects that are no datasets, and samples of types that `fingerprint` does not know.
"""

import dis
from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from copy import copy
from functools import _lru_cache_wrapper
from itertools import zip_longest
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from elastic.data.attributes import has_space, space_of
from elastic.data.contents import is_array
from elastic.data.fingerprint import fingerprint
from elastic.data.own_files import is_own_class
from elastic.errors import UsageError

_CONTAINERS = dict, list, set, deque, OrderedDict, defaultdict
_MOST_ITEMS = 1 << 17  # of a container
_MOST_BYTES = 1 << 20  # of a row
_DEPTH = 4
_NOTHING = object()
_OF_COLLATE = (
    "each process would keep its own, of the batches that it loaded: compute it in the function of the step, add it up by step.sum and keep it in "
    "elastic.Values, or use a constant"
)


def check(dataset: Any, samples: list[int], load: Callable[[bool], Any], collate: Any = None) -> None:
    """Raises UsageError, with the attribute that remembers where it is found.

    load: gives these samples of the dataset, under their own random streams (True) or others.
    collate: makes a batch of them.
    """
    memory = _Memory(dataset, samples)
    memory.note_collate(collate)
    first, other, again = (fingerprint(load(own)) for own in (True, False, True))
    changed = memory.changed()
    memory.put_back()
    if first == again and other == fingerprint(load(False)):
        return
    memory.put_back()
    if not changed or first != fingerprint(load(True)):
        found = "the same samples, loaded again under the same random streams, are other ones: it draws from a generator of its own"
        if collate is not None:
            found += ", or collate keeps something from call to call"
        advice = "draw from the global generators of torch, Python or NumPy in __getitem__, which are keyed for each sample"
    elif first == again:
        found = f"{changed[0]} keeps samples with the random numbers of their first augmentation, so that each process trains others"
        advice = "keep what was read there, and augment what is returned"
    else:
        found = f"{changed[0]} was changed while samples were loaded, and the same samples, loaded again, are other ones"
        advice = "leave it as it is, and augment a copy (.clone() of a tensor, .copy() of an array)"
        if memory.is_number(changed[0]):
            advice = "each process counts its own: take the number from the sample's, or let the loop set it from step.number before the step's first computation"
        if changed[0].startswith("collate"):
            advice = _OF_COLLATE
    raise UsageError(
        f"expected a dataset that gives the same samples at any time, found that {found}; {advice}"
    )


class _Memory:
    """What a dataset, and the datasets in it, hold before some samples are loaded."""

    def __init__(self, dataset: Any, samples: list[int]) -> None:
        self._containers: list[tuple[str, Any, Any]] = []  # name, container, copy
        self._rows: list[tuple[str, Any, Any]] = []  # name, view of a tensor or an array, copy
        self._versions: list[tuple[str, Tensor, int]] = []
        # Numbers, and tensors that are replaced: name, object or class, attribute, value.
        self._numbers: list[tuple[str, Any, str, Any]] = []
        self._calls: list[tuple[str, Any, int]] = []  # name, function with a cache, size
        seen: set[int] = set()
        for sample in samples:
            for thing, name, number in _datasets(dataset, "dataset", sample, 0):
                if id(thing) not in seen:
                    seen.add(id(thing))
                    self._note(thing, name)
                    for part, place in _parts(thing, name, seen, 0):
                        self._note(part, place)
                for attribute, value in space_of(thing).items():
                    self._note_row(value, f"{name}.{attribute}", number)

    def changed(self) -> list[str]:
        """The names of what was written to, data first."""
        found = [name for name, tensor, version in self._versions if tensor._version != version]  # noqa: SLF001
        found += [name for name, row, before in self._rows if fingerprint(row) != fingerprint(before)]
        found += [name for name, value, before in self._containers if _new(value, before)]
        found += [
            name
            for name, of, key, number in self._numbers
            if _is_another(_space(of).get(key, _NOTHING), number)
        ]
        found += [name for name, call, size in self._calls if call.cache_info().currsize != size]
        return list(dict.fromkeys(found))

    def is_number(self, name: str) -> bool:
        return any(place == name and not is_array(value) for place, _, _, value in self._numbers)

    def note_collate(self, collate: Any) -> None:
        """What it, or the object that it is a method of, has as attributes, and what it assigns."""
        function = getattr(collate, "func", collate)  # of a partial
        holder = getattr(function, "__self__", function)
        if has_space(holder) and not isinstance(holder, type | ModuleType):
            name = "collate" if holder is function else type(holder).__name__
            self._note(holder, name)
            for part, place in _parts(holder, name, set(), 0):
                self._note(part, place)
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType):
            space, known = _Space(), function.__globals__
            space.__dict__ = known
            assigned = {
                each.argval for each in dis.get_instructions(function) if each.opname == "STORE_GLOBAL"
            }
            self._numbers += [
                (f"collate's {name}", space, name, known[name]) for name in sorted(assigned & known.keys())
            ]

    def put_back(self) -> None:
        """All but what is no data, such as files that were opened."""
        for _, row, before in self._rows:
            if fingerprint(row) != fingerprint(before):
                with torch.no_grad():
                    row[...] = before
        for _, value, before in self._containers:
            new = _new(value, before)
            if new and all(map(_is_data, new)):
                value.clear()
                (value.update if isinstance(value, dict | set) else value.extend)(before)
        for _, of, key, number in self._numbers:
            if not _is_another(_space(of).get(key, _NOTHING), number):
                continue
            if isinstance(of, type):
                setattr(of, key, number)
            elif number is _NOTHING:
                space_of(of).pop(key, None)
            else:
                space_of(of)[key] = number
        for _, call, _ in self._calls:
            call.cache_clear()

    def _note(self, thing: Any, name: str) -> None:
        for attribute, value in space_of(thing).items():
            place = f"{name}.{attribute}"
            if type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS:
                self._containers.append((place, value, copy(value)))
            elif type(value) in (bool, int, float) or is_array(value):
                self._numbers.append((place, thing, attribute, value))
            if is_array(value) and isinstance(value, Tensor) and not value.is_inference():
                self._versions.append((place, value, value._version))  # noqa: SLF001
        for kind in type(thing).__mro__:
            for attribute, value in vars(kind).items() if is_own_class(kind) else ():
                if type(value) in (bool, int, float) and not attribute.startswith("__"):
                    self._numbers.append((f"{name}.{attribute}", kind, attribute, value))
                    if attribute not in space_of(thing):  # `self.count += 1` makes it
                        self._numbers.append((f"{name}.{attribute}", thing, attribute, _NOTHING))
            self._calls += [
                (f"{kind.__name__}.{attribute}", call, call.cache_info().currsize)
                for attribute, call in vars(kind).items()
                if isinstance(call, _lru_cache_wrapper)
            ]

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


def _space(of: Any) -> Any:
    return vars(of) if isinstance(of, type) else space_of(of)


class _Space:
    """Global variables as an object's attributes."""


def _is_another(now: Any, before: Any) -> bool:
    if type(before) in (bool, int, float) and type(now) is type(before):
        return bool(now != before)
    return now is not before


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
