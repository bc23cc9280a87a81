"""What an object was at a moment, in so few bytes that a later look tells whether it changed.

A tensor's mark is the object, its count of changes and a checksum of a bounded part: a change
through `.data` or through a view of NumPy counts as none. An array's, and that of bytes that can
change, is a checksum alone, a generator's its state, a number's its text. Nothing of the recipe's
is called, and no mark keeps what it marks alive. Content of other kinds (files, connections) has no
mark.
"""

import array
import ctypes
import itertools
import mmap
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from elastic.snapshot.image import tensor_bytes
from elastic.train.iterator_places import file_place, place_of
from elastic.train.words import PLAIN, TEXT, plain_text, word_text

ARRAY_BYTES = 2**22
TENSOR_BYTES = 2**18
OF_CTYPES: Any = ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union  # noqa: SLF001
_BUFFERS = bytearray, memoryview, array.array, mmap.mmap, *OF_CTYPES
_NUMPY_RANDOM = np.random.Generator, np.random.RandomState, np.random.BitGenerator, np.random.SeedSequence
_OF_PROCESS = {id(random.random.__self__), id(np.random.mtrand._rand)}  # type: ignore[attr-defined]  # noqa: SLF001


class Kind(Enum):
    TENSOR = "tensor"
    ARRAY = "array"
    RANDOM = "generator of random numbers"
    ITERATOR = "iterator"
    PLAIN = "plain"


class Weight(IntEnum):
    """What a change means: nothing, a word on the console, or the end of the run."""

    NONE = 0
    SAID = 1
    REFUSED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The weights of three kinds of change, by where the object hangs.

    rebound: another tensor, array or generator is in its place. in_place: the same one has changed.
    plain: a number, a string or the length of a list.
    """

    rebound: Weight
    in_place: Weight
    plain: Weight

    def at_most(self, limit: Weight) -> "Rules":
        return Rules(
            rebound=min(self.rebound, limit), in_place=min(self.in_place, limit), plain=min(self.plain, limit)
        )


@dataclass(frozen=True, slots=True, eq=False)
class ChosenTensor:
    """Which tensor of the State is in a place, as the value of its mark: what it holds is saved.

    It is the same one while the object is, or its memory: `weight.data` makes an object each time.
    """

    tensor: ReferenceType[Tensor]
    memory: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "ChosenTensor":
        return cls(ref(tensor), (storage_of(tensor), tensor.storage_offset(), tuple(tensor.shape)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChosenTensor):
            return False
        return self.memory == other.memory or (self.tensor() is not None and self.tensor() is other.tensor())

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """owner: what holds it, a word for the sentence. entry: of the State whose object holds it."""

    kind: Kind
    value: Any
    rules: Rules
    anchor: ReferenceType[Any] | None = None
    owner: str = ""
    entry: str = ""

    def weight_of_change(self, before: "Mark | None", *, is_made_late: bool = False) -> Weight:
        """before: what the same path was earlier, None if there was nothing.

        is_made_late: it hangs on nothing that was there before, nor when the process began.
        """
        if is_made_late and self.kind in (Kind.TENSOR, Kind.ARRAY):
            return self.rules.in_place
        if before is None and self.kind is Kind.PLAIN and self.owner == "namespace":
            return self.rules.plain  # the loop's code gives a class or a module another attribute
        if isinstance(self.value, ChosenTensor) and before is not None and before.kind is Kind.TENSOR:
            is_same = before.anchor is not None and before.anchor() is self.value.tensor()
            return Weight.NONE if is_same else min(self.rules.plain, Weight.SAID)  # saved since then
        if before is None:  # made when it was first needed, perhaps
            return min(self.rules.rebound, Weight.SAID) if self.kind is not Kind.PLAIN else Weight.NONE
        if before.kind is not self.kind:
            return min(self.rules.rebound, Weight.SAID)
        if self.kind is Kind.PLAIN:
            if before.value == self.value:
                return Weight.NONE
            was_empty = isinstance(before.value, tuple) and before.value[:1] == (0,)
            if was_empty and self.owner == "cache by key":
                return Weight.NONE
            return (
                min(self.rules.plain, Weight.SAID) if was_empty and self.owner == "dict" else self.rules.plain
            )
        if self.kind is Kind.TENSOR and before.anchor is not None and self.anchor is not None:
            found = before.anchor()
            if found is None or found is not self.anchor():
                return self.rules.rebound
        if before.value == self.value:
            return Weight.NONE
        if self.kind is Kind.RANDOM and before.value[0] != self.value[0]:
            return Weight.NONE  # seeded since, as one does from the step's number
        return self.rules.in_place if _is_same(before, self) else self.rules.rebound


def _is_same(before: Mark, now: Mark) -> bool:
    return before.anchor is None or now.anchor is None or before.anchor() is now.anchor()


def mark_of(thing: Any, rules: Rules, owner: str = "", entry: str = "") -> Mark | None:
    """None for an object that has no mark of its own, such as a container."""
    found: tuple[Kind, Any, bool] | None = None
    if type(thing) in PLAIN:
        found = Kind.PLAIN, plain_text(thing), False
    elif isinstance(thing, Tensor):
        if thing.grad_fn is not None:  # a forward's output, which no later step can train through
            rules = rules.at_most(Weight.SAID)
        version = 0 if thing.is_inference() else thing._version  # noqa: SLF001 - autograd's count of changes
        found = Kind.TENSOR, (version, tensor_checksum(thing)), True
    elif isinstance(thing, np.ndarray):
        found = Kind.ARRAY, array_checksum(thing), True
    elif isinstance(thing, torch.Generator):
        found = Kind.RANDOM, (thing.initial_seed(), thing.get_state().numpy().tobytes()), False
    elif isinstance(thing, _NUMPY_RANDOM) and id(thing) not in _OF_PROCESS:
        found = Kind.RANDOM, (0, repr(_bits_of(thing).state)), False
    elif isinstance(thing, random.Random) and id(thing) not in _OF_PROCESS:
        found = Kind.RANDOM, (0, hash(random.Random.getstate(thing))), False
    elif type(thing) is itertools.count:
        rules = replace(rules, in_place=rules.plain)  # a number, such as of names that are given out
        found = Kind.ITERATOR, repr(thing)[:TEXT], False
    elif (place := place_of(thing)) is not None:
        found = Kind.ITERATOR, *place, False
    elif isinstance(thing, _BUFFERS):
        place_in_map = thing.tell() if isinstance(thing, mmap.mmap) and not thing.closed else 0
        found = Kind.ARRAY, (*buffer_checksum(thing), place_in_map), False
    elif isinstance(thing, torch.UntypedStorage) and thing.device.type == "cpu":
        found = Kind.ARRAY, tensor_checksum(torch.tensor([], dtype=torch.uint8).set_(thing)), False
    elif (text := word_text(thing)) is not None:
        found = Kind.PLAIN, text, False
    elif (place := file_place(thing)) is not None:  # the loop may go back in it before it reads
        rules, owner = replace(rules, in_place=rules.plain), "file"
        found = Kind.ITERATOR, *place, False
    if found is None:
        return None
    kind, value, has_anchor = found
    anchor = ref(thing) if has_anchor else None
    return Mark(kind=kind, value=value, rules=rules, anchor=anchor, owner=owner, entry=entry)


def _bits_of(thing: Any) -> Any:
    """What has the state of a generator of NumPy's: it, or its own source of bits."""
    if isinstance(thing, np.random.RandomState):
        return thing._bit_generator  # noqa: SLF001
    return thing.bit_generator if isinstance(thing, np.random.Generator) else thing


def buffer_checksum(thing: Any) -> tuple[int, int]:
    """Of at most ARRAY_BYTES, the first ones. (0, 0) for a memory that is closed."""
    try:
        view = memoryview(thing)
    except ValueError:
        return 0, 0
    if view.nbytes and view.c_contiguous:
        return view.nbytes, zlib.crc32(view.cast("B")[:ARRAY_BYTES])
    return view.nbytes, zlib.crc32(view.tobytes()[:ARRAY_BYTES])


def array_checksum(array: Any) -> tuple[Any, ...]:
    """Of at most ARRAY_BYTES, taken evenly."""
    if array.dtype.hasobject or array.size == 0:
        return (array.shape,)
    every = -(-array.nbytes // ARRAY_BYTES)
    part = array if every == 1 else array.reshape(-1)[::every] if array.flags.c_contiguous else array[::every]
    return (array.shape, str(array.dtype), zlib.crc32(np.ascontiguousarray(part).tobytes()))


def tensor_checksum(tensor: Tensor) -> int:
    """Of at most TENSOR_BYTES, taken evenly; 0 where a tensor has no memory that can be read.

    A GPU gives that part alone.
    """
    if storage_of(tensor) == 0:
        return 0
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001 - no code of the recipe's
        # In the order in which they lie, so that no large one is copied.
        dense = tensor.detach().permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
        every = -(-tensor.nbytes // TENSOR_BYTES)
        if every > 1:
            dense = dense.reshape(-1)[::every] if dense.is_contiguous() else dense[::every]
        return zlib.crc32(tensor_bytes(dense).numpy().data)


def storage_of(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 where it has none that can be compared."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return _storage_of(tensor)
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - no code of the recipe's
        return _storage_of(tensor)


def _storage_of(tensor: Tensor) -> int:
    try:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or not tensor.numel():
            return 0
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):  # a subclass without memory; a lazy parameter
        return 0


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors, numbers and the like of nested dicts, lists and tuples, each with its key."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key), None
            if isinstance(item, (dict, list, tuple)):
                yield from leaves(item, str(key))
            else:
                yield str(key), item
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item, name)
    else:
        yield name, value


def containers(value: Any) -> Iterator[Any]:
    """The lists, dicts and arrays among nested ones."""
    if isinstance(value, (list, dict, np.ndarray)):
        yield value
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item)
