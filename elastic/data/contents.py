"""Data sets are told apart by what they hold in memory, as far as that is alike in all processes.

What counts, in the dataset's own attributes and in those of the datasets that it wraps: tensors,
arrays, and lists of numbers and texts, such as the indices of a split or the names of files. Of
large ones parts count that are spread evenly, 256 KiB of each at most. Texts count without the
folder that all of a list lie in, which may differ between machines. What a dataset reads from disk
for each sample does not count, nor single numbers, dicts of other things than these, objects, and
what has "cache" in its name or is still empty, nor slots of a class. No code of the user is run.
"""

import hashlib
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

MOST_BYTES = 1 << 18  # of one part
MOST_ITEMS = 1 << 13  # of a list
MOST_PARTS = 32  # with a name of their own
_RUNS = 64  # stretches that a large part is sampled by
_DEPTH = 4
_FEW = 64  # datasets or tensors in a list, entries of a dict

Hash = Any


def contents_of(dataset: Any) -> dict[str, str]:
    """A hash of each part by its name, such as `dataset.indices` or `dataset.tensors[0]`."""
    found: dict[str, str] = {}
    rest = hashlib.sha256()
    for name, value in _parts(dataset, "dataset", 0, set()):
        part = hashlib.sha256()
        _add(part, value, MOST_BYTES, _common_folder(value))
        if len(found) < MOST_PARTS:
            found[name] = part.hexdigest()[:16]
        else:
            rest.update(f"{name} {part.hexdigest()}".encode())
            found["other parts of the dataset"] = rest.hexdigest()[:16]
    return found


def _parts(thing: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Each tensor, array and list of values with its name. seen: datasets that had their turn."""
    if _is_list(thing) and len(thing) <= _FEW and isinstance(thing[0], Tensor | np.ndarray | Dataset):
        for number, item in enumerate(thing):
            yield from _parts(item, f"{name}[{number}]", depth, seen)
    elif is_array(thing) or _is_list(thing):
        yield name, thing
    elif type(thing) is dict and len(thing) <= _FEW:
        for key, item in thing.items():
            if type(key) is str and (is_array(item) or _is_list(item)):
                yield from _parts(item, f"{name}[{key!r}]", depth, seen)
    elif depth < _DEPTH and id(thing) not in seen and (not depth or _is_dataset(thing, name)):
        seen.add(id(thing))
        # Its own attributes, without a `__getattr__` or property of its class.
        for attribute, value in list(getattr(thing, "__dict__", {}).items()):
            if "cache" not in attribute.lower():
                yield from _parts(value, f"{name}.{attribute}", depth + 1, seen)


def _is_dataset(thing: Any, name: str) -> bool:
    return isinstance(thing, Dataset) or name.endswith(".dataset")


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple, range) and len(value) > 0


def is_array(value: Any) -> bool:
    """Tensors and arrays whose bytes are their values; a file that may be written to is no data."""
    if type(value) in (Tensor, nn.Parameter):
        return value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized
    if type(value) is np.memmap:
        return not value.flags.writeable and value.dtype.kind not in "OV"
    return type(value) is np.ndarray and value.dtype.kind not in "OV"


def _add(found: Hash, value: Any, most_bytes: int, folder: str) -> None:
    """folder: what texts begin with that does not count."""
    if is_array(value):
        shape = list(value.shape)
        if isinstance(value, np.ndarray) and value.dtype.kind in "US":
            found.update(f"texts {shape} ".encode())
            _add_items(found, value, most_bytes, folder)
        else:
            found.update(f"{value.dtype} {shape} ".encode())
            found.update(_sampled(value, most_bytes))
    elif _is_list(value):
        found.update(f"list {len(value)} ".encode())
        _add_items(found, value, most_bytes, folder)
    elif isinstance(value, str | PurePath):
        found.update(f"{str(value).removeprefix(folder)!r} ".encode(errors="backslashreplace"))
    elif isinstance(value, np.number | np.bool):
        found.update(f"{value.dtype} ".encode() + value.tobytes())
    elif type(value) in (bool, int, float, complex, bytes):
        found.update(f"{value!r} ".encode())
    else:
        found.update(f"{type(value).__name__} ".encode())


def _add_items(found: Hash, value: Any, most_bytes: int, folder: str) -> None:
    items = _items(value, min(MOST_ITEMS, max(1, most_bytes // 32)))
    for item in items:
        _add(found, item, most_bytes // len(items), folder)


def _items(value: Any, most: int) -> list[Any]:
    """At most so many items of a list or of an array of texts."""
    if isinstance(value, np.ndarray):
        return list(value.reshape(-1)[_places(value.size, most)].tolist())
    return [value[place] for place in _places(len(value), most).tolist()]


def _sampled(value: Any, most_bytes: int) -> bytes:
    """The bytes of elements of a tensor or array, in their order."""
    if isinstance(value, np.ndarray):
        places = _places(value.size, most_bytes // max(1, value.itemsize))
        return bytes(np.atleast_1d(value)[np.unravel_index(places, np.atleast_1d(value).shape)].tobytes())
    plain = value.detach().reshape(1) if value.ndim == 0 else value.detach()
    places = _places(plain.numel(), most_bytes // max(1, plain.element_size()))
    index = tuple(torch.from_numpy(each) for each in np.unravel_index(places, plain.shape))
    taken = plain[index].cpu().resolve_conj().resolve_neg()
    return bytes(taken.view(torch.uint8).numpy().tobytes()) if taken.numel() else b""


def _places(count: int, most: int) -> NDArray[np.int64]:
    """int64: all numbers below `count`, or `most` of them in stretches that are spread evenly."""
    most = max(1, most)
    if count <= most:
        return np.arange(count)
    runs = min(_RUNS, most)
    length = most // runs
    starts = np.arange(runs) * (count - length) // max(1, runs - 1)
    return (starts[:, None] + np.arange(length)).reshape(-1)


def _common_folder(value: Any) -> str:
    """What all texts of a list begin with, up to the last slash."""
    texts = list(_texts(value, MOST_ITEMS))
    if not texts:
        return ""
    first, last = min(texts), max(texts)
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[: first.rfind("/", 0, same) + 1]


def _texts(value: Any, most: int) -> Iterator[str]:
    if isinstance(value, str | PurePath):
        yield str(value)
    elif _is_list(value) or (isinstance(value, np.ndarray) and value.dtype.kind == "U"):
        items = _items(value, max(1, most))
        for item in items:
            yield from _texts(item, most // len(items))
