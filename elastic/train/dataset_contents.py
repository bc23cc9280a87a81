"""What the elements of a dataset's arrays, lists and dicts are, as far as the loop may write them.

`dataset.labels[i] = k` leaves the array the same object of the same length, and `tensor.data` and
arrays of NumPy have no count of changes. So each reading takes sums of the bytes of tensors and
arrays, and the elements of containers, and of records in them, by identity, numbers and words by
value. It is bounded: of a tensor or an array above 16 MiB 64 stretches of 16 KiB that are spread
evenly are read; so of each above 1 MiB that comes once 32 MiB were read; 4 such stretches of each
above 64 KiB once 64 MiB were read. Of a list of numbers and words 2**20 elements are read, of one
of rows of them 2**16. Of one of other rows, such as tensors with their labels, 2**13 rows are read:
which objects, numbers and words they hold. What is inside those objects is read of 2**12 elements
in all, and of 64 of each attribute at least, taken evenly; an attribute keeps the number that it
had at first. None of the recipe's code runs.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from torch import Tensor

from elastic.data.attributes import has_space, space_of
from elastic.data.own_files import is_own_class
from elastic.data.stale_copies import SHARED, Attributes, is_record_class
from elastic.train.flat_state import array_sums, tensor_sums
from elastic.train.object_marks import OF_CTYPES, storage_of

WHOLE_BYTES = 1 << 24
ALL_BYTES = 1 << 25
PART_BYTES = 1 << 20  # of a larger one
RUNS, FEW_RUNS = 64, 4  # stretches of one, and of one that comes late
RUN_BYTES = PART_BYTES // RUNS
MANY_ROWS = 1 << 16  # of a list of lists, tuples or dicts of numbers and words
MANY_MIXED = 1 << 13  # of a list of other rows: what they hold, and not what is inside that
ELEMENTS = 1 << 12  # whose inside is read, in all
FEW_ELEMENTS = 1 << 6  # of one attribute, at least
SHORT = 16  # a row of so many is read as a whole
MANY_FLAT = 1 << 20
_DEPTH = 4
_BUFFERS = bytearray, array, *OF_CTYPES
_FLAT = frozenset({bool, int, float, complex, str, bytes, type(None)})


@dataclass(slots=True, kw_only=True)
class DatasetContents:
    """Call `read` with what stale_copies.attributes_of gave.

    in_place: names of the last reading's changes whose object stayed the same.
    """

    in_place: set[str] = field(default_factory=set)
    _before: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # the object, its contents
    _elements: dict[str, int] = field(default_factory=dict)  # that an attribute may have read

    def read(self, attributes: Attributes) -> list[str]:
        """The names of those whose elements are not what they were at the last reading."""
        budget, known, left = _Budget(), self._before, ELEMENTS
        entered = {name.rpartition(".")[0] for name in attributes}
        self._before = {}
        for name, each in attributes.items():
            if name not in entered and _counts(each.value):
                # Else a cache that grows would change which elements of the others are read.
                budget.elements = most = self._elements.setdefault(name, max(FEW_ELEMENTS, left))
                self._before[name] = each.value, budget.contents(each.value, 0)
                left -= most - budget.elements
        self.in_place = {
            name
            for name, (thing, contents) in self._before.items()
            if name in known and known[name][0] is thing and known[name][1] != contents
        }
        return sorted(self.in_place)


class _Budget:
    """What one reading may still read."""

    def __init__(self) -> None:
        self.bytes, self.elements = ALL_BYTES, ELEMENTS

    def contents(self, value: Any, depth: int) -> Any:
        """What tells apart two states of one object; equal where nothing was written."""
        if type(value) in _FLAT:
            return value
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, np.ndarray):
            return self._of_array(value)
        if isinstance(value, SHARED):  # what multiprocessing shares, below its lock
            return self.contents(vars(value)["_obj"], depth)
        if depth < _DEPTH and isinstance(value, partial):
            return tuple(self.contents(each, depth + 1) for each in (value.args, value.keywords))
        if isinstance(value, _BUFFERS):
            return self._of_array(np.frombuffer(value, np.uint8))
        if depth < _DEPTH and isinstance(value, list | tuple | deque):
            return self._of_sequence(value, depth)
        if depth < _DEPTH and isinstance(value, dict):
            return tuple(dict.keys(value)), self._of_sequence(list(dict.values(value)), depth)
        if isinstance(value, set | frozenset):
            return frozenset(each for each in value if type(each) in _FLAT), len(value)
        if depth < _DEPTH and is_record(value):
            return self._of_sequence(list(space_of(value).values()), depth)
        return _Same(value)

    def _of_sequence(self, value: Any, depth: int) -> Any:
        most = MANY_FLAT if type(next(iter(value), None)) in _FLAT else MANY_ROWS
        items = _evenly(value if isinstance(value, list | tuple) else tuple(value), most)
        kinds = frozenset(map(type, items))
        if not kinds <= _FLAT:
            items = _flat_copies(items, kinds) or self._of_mixed(items, depth)
        return kinds, len(value), items

    def _of_mixed(self, items: tuple[Any, ...], depth: int) -> Any:
        rows = [_row(each) for each in _evenly(items, MANY_MIXED)]
        width = 1 if _is_alone(items[0]) else 1 + len(rows[0])
        chosen = _evenly(items, max(SHORT, self.elements // width))
        self.elements -= len(chosen)
        return _Rows(rows), tuple(self.contents(each, depth + 1) for each in chosen)

    def _of_array(self, thing: Any) -> Any:
        if thing.dtype.hasobject:
            return self._of_sequence(thing.reshape(-1).tolist(), 0) if thing.size <= MANY_FLAT else None
        if not thing.size:
            return None
        runs = self._runs(thing.nbytes, 0 if isinstance(thing, np.memmap) else WHOLE_BYTES)
        is_contiguous = thing.flags.c_contiguous
        sums = _of_stretches(thing, runs, is_contiguous=is_contiguous) if runs else array_sums(thing)
        return _Sums(runs, sums)

    def _of_tensor(self, tensor: Tensor) -> Any:
        if storage_of(tensor) == 0:
            return None
        plain = tensor.detach()
        runs = self._runs(plain.nbytes, WHOLE_BYTES)
        sums = _of_stretches(plain, runs, is_contiguous=False) if runs else tensor_sums(plain)
        return _Sums(runs, sums)

    def _runs(self, size: int, whole_bytes: int) -> int:
        """How many stretches of a tensor or an array are read; 0 for all of it, as one."""
        runs = RUNS if self.bytes > -ALL_BYTES else FEW_RUNS
        is_whole = size <= max(min(whole_bytes, self.bytes), runs * RUN_BYTES)
        self.bytes -= size if is_whole else runs * RUN_BYTES
        return 0 if is_whole else runs


class _Same:
    """Equal to another one of the same object, without a comparison of the recipe's."""

    __slots__ = ("_thing",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._thing is self._thing


class _Rows:
    """Equal to other ones that hold the same objects, and equal numbers and words."""

    __slots__ = ("_rows",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, rows: list[tuple[Any, ...]]) -> None:
        self._rows = rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rows) and all(map(_is_same_row, self._rows, other._rows))


class _Sums:
    """Equal to one of the same sums, or of other stretches, which tell nothing of each other.

    What was read before a tensor, such as a cache that grows, decides how many there are.
    """

    __slots__ = ("_runs", "_sums")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, runs: int, sums: bytes) -> None:
        self._runs, self._sums = runs, sums

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Sums) and (other._runs != self._runs or other._sums == self._sums)


def _counts(value: Any) -> bool:
    """Whether it can be written to and stay the same object, and holds data."""
    is_data = isinstance(value, (Tensor, np.ndarray, list, tuple, dict, set, deque, partial, *_BUFFERS))
    return is_data or isinstance(value, SHARED) or is_record(value)


def is_shared(value: Any) -> bool:
    """Whether the processes that load samples write to it for all, at any time."""
    is_shared_tensor = isinstance(value, Tensor) and value.is_shared()  # type: ignore[no-untyped-call]
    return is_shared_tensor or isinstance(value, SHARED)


def is_record(value: Any) -> bool:
    """Of the recipe's own, or a namespace: with attributes, and no code that could set them."""
    kind: Any = type(value)
    return has_space(value) and (
        kind.__name__ in ("SimpleNamespace", "Namespace") or (is_own_class(kind) and is_record_class(kind))
    )


def _row(item: Any) -> tuple[Any, ...]:
    """What a row holds, of a long one only the first ones; or the item itself."""
    if isinstance(item, list | tuple):
        return tuple(item[:SHORT])
    if isinstance(item, dict):
        return tuple(islice(dict.values(item), SHORT))
    return tuple(islice(space_of(item).values(), SHORT)) if is_record(item) else (item,)


def _is_alone(item: Any) -> bool:
    return not isinstance(item, list | tuple | dict) and not is_record(item)


def _is_same_row(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) and type(a) in _FLAT and repr(a) == repr(b))
        for a, b in zip(one, other, strict=True)
    )


def _of_stretches(thing: Any, most: int, *, is_contiguous: bool) -> bytes:
    """Of rows that are spread evenly, at most `most` times RUN_BYTES, or one row.

    thing: of more bytes than that.
    """
    if isinstance(thing, Tensor):  # in the order in which they lie
        thing = thing.permute(sorted(range(thing.ndim), key=thing.stride, reverse=True))
        is_contiguous = thing.is_contiguous()
    rows = thing.reshape(-1) if is_contiguous else thing
    part_bytes = most * RUN_BYTES
    runs = min(most, len(rows), max(1, part_bytes // max(1, rows[0].nbytes)))
    length = max(1, int(len(rows) * part_bytes / rows.nbytes) // runs)
    starts = [place * (len(rows) - length) // max(1, runs - 1) for place in range(runs)]
    take = tensor_sums if isinstance(rows, Tensor) else array_sums
    return b"".join(take(rows[start : start + length]) for start in starts)


def _evenly(items: list[Any] | tuple[Any, ...], most: int) -> tuple[Any, ...]:
    return tuple(items[:: -(-len(items) // most) or 1])


def _flat_copies(items: tuple[Any, ...], kinds: frozenset[type]) -> tuple[Any, ...]:
    """Of lists, tuples or dicts that hold numbers and words alone; empty for others."""
    (kind, *others) = kinds
    if others or kind not in (list, tuple, dict):
        return ()
    held = chain.from_iterable(map(dict.values, items) if kind is dict else items)
    return tuple(map(kind, items)) if _FLAT.issuperset(map(type, held)) else ()
