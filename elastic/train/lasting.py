"""What a call leaves behind and the next one finds is looked at part by part, with its contents.

A first call that makes a container, a copy of the model or an object makes it where no look before
could know it. So each part of what is new (a tensor, a number, by its path inside) is noted with
its contents at that moment: what the same call then changes again is a memory, though the container
stays the same.

A part that stays as it is at each later call was made for good by the first one. It is a cache of
sizes and of constants if a first call of another shard, and one with other weights, make the same.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from elastic.data.own_files import is_own_class
from elastic.train.audit_evidence import tensor_checksum
from elastic.train.object_marks import storage_of
from elastic.train.own_code import attributes_of
from elastic.train.site import MODULES_OWN

ABSENT = object()  # there is no such key
DEPTH = 3
MAX_ITEMS = 1000  # of one container
_FACTOR, _SUMMAND = 1.0625, 2.0**-7  # exact in every type of floats


class Part(NamedTuple):
    """content: a checksum of it, when it was noted."""

    thing: Any
    content: str


Parts = dict[str, Part]  # by path; the value itself has the empty one


def content_of(value: Any, depth: int = DEPTH) -> str:
    """The same for equal numbers, words, tensors, and containers of them; others are all alike."""
    match value:
        case Tensor() if value.layout is torch.strided and value.device.type != "meta":
            return tensor_checksum(value)
        case np.ndarray() if not value.dtype.hasobject:
            return hashlib.sha256(f"{value.dtype} {value.shape}".encode() + value.tobytes()).hexdigest()
        case None | bool() | int() | float() | complex() | str() | bytes():
            return f"{type(value).__name__} {value!r}"
        case dict() if depth:
            return repr({repr(key): content_of(item, depth - 1) for key, item in value.items()})
        case list() | tuple() | deque() if depth:
            return repr([content_of(item, depth - 1) for item in value])
        case set() | frozenset():
            return repr(sorted(map(repr, value)))
        case _:
            return "nothing" if value is ABSENT else "something"


def parts_of(value: Any, left_out: frozenset[int]) -> Parts:
    """left_out: addresses of memory; tensors that lie there are another's business."""
    return dict(_parts(value, "", left_out, DEPTH))


def unchanged(before: Parts, after: Parts) -> Parts:
    """Numbers, tensors and arrays that are the same objects with the same contents."""
    return {
        path: part
        for path, part in before.items()
        if isinstance(part.thing, float | Tensor | np.ndarray)
        and (now := after.get(path)) is not None
        and now.thing is part.thing
        and now.content == part.content
    }


def differing(kept: Parts, other: Parts, *, floats_only: bool) -> bool:
    """Whether a first call of another kind makes any part otherwise.

    floats_only: and of the same shape; a size that a cache has reached is a whole number.
    """
    return any(
        (found := other.get(path)) is not None
        and found.content != part.content
        and (not floats_only or _are_alike(part.thing, found.thing))
        for path, part in kept.items()
    )


@contextmanager
def moved(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """These parameters have other values inside, which are put back; autograd counts none of it."""
    # On the host: a second copy may not fit beside the first on a GPU.
    copies = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data.mul_(_FACTOR).add_(_SUMMAND)
        yield
    finally:
        for parameter, copy in zip(parameters, copies, strict=True):
            parameter.data.copy_(copy)


def _are_alike(one: Any, other: Any) -> bool:
    match one, other:
        case float(), float():
            return True
        case Tensor(), Tensor():
            return one.is_floating_point() and one.shape == other.shape
        case np.ndarray(), np.ndarray():
            return bool(one.dtype.kind == "f" and one.shape == other.shape)
        case _:
            return False


def _parts(value: Any, path: str, left_out: frozenset[int], depth: int) -> Iterator[tuple[str, Part]]:
    if isinstance(value, Tensor):
        if storage_of(value) not in left_out:
            yield path, Part(value, content_of(value))
        return
    items = _items(value) if depth else None
    if items is None:
        yield path, Part(value, content_of(value))
        return
    for (name, item), _ in zip(items, range(MAX_ITEMS), strict=False):
        yield from _parts(item, path + name, left_out, depth - 1)


def _items(value: Any) -> Iterable[tuple[str, Any]] | None:
    """What is inside, with what a recipe would write behind the name to get it."""
    match value:
        case nn.Module():
            tensors = [*value.named_parameters(), *value.named_buffers()]
            own = [(name, each) for name, each in vars(value).items() if name not in MODULES_OWN]
            return [(f".{name}", each) for name, each in (*tensors, *own)]
        case dict():
            return [(f"[{key!r:.40}]", item) for key, item in value.items() if _is_word(key)]
        case list() | tuple() | deque():
            return [(f"[{index}]", item) for index, item in enumerate(value)]
        case _ if isinstance(value, SimpleNamespace) or is_own_class(type(value)):
            return [(f".{name}", each) for name, each in attributes_of(value)]
        case _:
            return None


def _is_word(key: Any) -> bool:
    """Whether its text is the same in every process, and costs no code of the recipe's."""
    return isinstance(key, str | int | float | bool | None)
