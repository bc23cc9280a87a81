"""Data are told apart by hashes: a data set by what it holds in memory, a batch by its values.

`contents_of` is alike in all processes. In the dataset's own attributes and in those of the
datasets that it wraps, tensors, arrays, and lists of numbers and texts count, such as the indices
of a split or the names of files. Large ones count by parts that are spread evenly, 256 KiB of each
at most. Texts count without the folder that all of a list lie in, which may differ between
machines. Files that a dataset reads for each sample do not count, nor single numbers, dicts of
other things than these, objects, and what has "cache" in its name or is still empty, nor slots of
a class. No code of the user is run.

`fingerprint` tells whether two loads of a batch gave the same samples, by its dense tensors,
numbers and texts, all of each. Values of other types count by their type alone: two equal ones may
not look alike. All NaNs count as one, since which of them arithmetic gives may depend on where its
operands lie.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

MOST_BYTES = 1 << 18  # of one part
MOST_ITEMS = 1 << 13  # of a list
WHOLE = 1 << 62  # bytes: more than any value has
_RUNS = 64  # stretches that a large part is sampled by
_DEPTH = 4
_FEW = 64  # datasets or tensors in a list, entries of a dict


def contents_of(dataset: Any) -> dict[str, str]:
    """A hash of each part by its name, such as `dataset.indices` or `dataset.tensors[0]`."""
    return {name: _hash_of(value) for name, value in _parts(dataset, "dataset", 0, set())}


def _parts(thing: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Each tensor, array and list of values with its name. seen: datasets that had their turn."""
    if _is_list(thing) and len(thing) <= _FEW and isinstance(thing[0], Tensor | np.ndarray | Dataset):
        for number, item in enumerate(thing):
            yield from _parts(item, f"{name}[{number}]", depth, seen)
    elif _is_array(thing) or _is_list(thing):
        yield name, thing
    elif type(thing) is dict and len(thing) <= _FEW:
        for key, item in thing.items():
            if type(key) is str and (_is_array(item) or _is_list(item)):
                yield from _parts(item, f"{name}[{key!r}]", depth, seen)
    elif id(thing) in seen or depth >= _DEPTH:
        return
    elif not depth or isinstance(thing, Dataset) or name.endswith(".dataset"):
        seen.add(id(thing))
        # Its own attributes, without a `__getattr__` or property of its class.
        for attribute, value in list(getattr(thing, "__dict__", {}).items()):
            if "cache" not in attribute.lower():
                yield from _parts(value, f"{name}.{attribute}", depth + 1, seen)


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple, range) and len(value) > 0


def _is_array(value: Any) -> bool:
    """Tensors and arrays whose bytes are their values; a file that may be written to is no data."""
    if type(value) in (Tensor, nn.Parameter):
        return value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized
    if type(value) is np.memmap:
        return not value.flags.writeable and value.dtype.kind not in "OV"
    return type(value) is np.ndarray and value.dtype.kind not in "OV"


def _hash_of(part: Any) -> str:
    leaves = list(_leaves(part, MOST_BYTES))
    folder = _common_folder([leaf for leaf in leaves if isinstance(leaf, str)])
    return _hash(leaf.removeprefix(folder) if isinstance(leaf, str) else leaf for leaf in leaves)


def fingerprint(data: Any) -> str:
    """The fingerprint of nested tuples, lists and dicts of values, in their order."""
    return _hash(_leaves(data, WHOLE))


def _hash(leaves: Iterable[bytes | str]) -> str:
    found = hashlib.sha256()
    for leaf in leaves:
        found.update(f"{leaf!r} ".encode(errors="backslashreplace") if isinstance(leaf, str) else leaf)
    return found.hexdigest()[:16]


def _leaves(value: Any, most_bytes: int) -> Iterator[bytes | str]:
    """What counts of a value, texts as they are and all else as bytes."""
    if isinstance(value, str | PurePath):
        yield str(value)
        return
    yield f"{type(value).__name__} ".encode()
    if most_bytes < WHOLE and isinstance(value, Tensor | np.ndarray | dict) and not _is_array(value):
        return
    if isinstance(value, Tensor):
        yield f"{value.dtype} {value.layout} ".encode()
        if value.layout is torch.strided and not value.is_nested and not value.is_meta:
            yield f"{list(value.shape)} ".encode()
            plain = real_numbers(_sampled(value.detach(), most_bytes).cpu()).contiguous()
            yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and value.dtype.kind in "OUS":  # bytes of objects are addresses
        yield f"{list(value.shape)} ".encode()
        yield from _leaves(value.reshape(-1).tolist(), most_bytes)
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {list(value.shape)} ".encode()
        yield _with_one_nan(_sampled(value, most_bytes)).tobytes()
    elif isinstance(value, list | tuple | range):
        most_items = len(value) if most_bytes == WHOLE else min(MOST_ITEMS, most_bytes // 32)
        places = _places(len(value), most_items).tolist()
        yield f"{len(value)} ".encode()
        for place in places:
            yield from _leaves(value[place], most_bytes // (1 if most_bytes == WHOLE else len(places)))
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves([name, each], most_bytes)
    elif isinstance(value, bool | int | float | complex | bytes | np.generic):
        yield f"{value!r} ".encode()


def _sampled(value: Any, most_bytes: int) -> Any:
    """The elements of a tensor or array that count, in their order, without a copy of all."""
    count, most = math.prod(value.shape), most_bytes // max(1, value.itemsize)
    if count <= most:
        return value
    index = np.unravel_index(_places(count, most), tuple(value.shape))
    return value[tuple(map(torch.from_numpy, index)) if isinstance(value, Tensor) else index]


def _places(count: int, most: int) -> NDArray[np.int64]:
    """int64: all numbers below `count`, or `most` of them in stretches that are spread evenly."""
    most = max(1, most)
    if count <= most:
        return np.arange(count)
    runs = min(_RUNS, most)
    length = most // runs
    starts = np.arange(runs) * (count - length) // max(1, runs - 1)
    return (starts[:, None] + np.arange(length)).reshape(-1)


def _common_folder(texts: list[str]) -> str:
    """What all texts of a list begin with, up to the last slash."""
    common = os.path.commonprefix(texts)  # noqa: RUF071 - of characters, as the slash is looked for
    return common[: common.rfind("/") + 1]


def real_numbers(tensor: Tensor) -> Tensor:
    """A dense tensor's numbers, two for a complex one, with one NaN for all."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    # A sum costs a third of a search for NaNs, and is one if there are any. Types of one byte have
    # neither.
    if real.is_floating_point() and real.itemsize > 1 and real.sum().isnan():
        return real.masked_fill(real.isnan(), torch.nan)
    return real


def _with_one_nan(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype.kind not in "fc":
        return array
    real = np.ascontiguousarray(array).view(array.real.dtype)
    return np.where(np.isnan(real), real.dtype.type(np.nan), real)
