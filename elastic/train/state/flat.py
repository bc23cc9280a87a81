"""A flattened state has a checksum that depends on its values alone, on whichever device they are.

Where a tensor begins in its memory stands beside it, for that is part of what its numbers become:
kernels for vectors take the elements up to the next boundary by themselves, so that a sum over a
tensor that begins elsewhere is rounded otherwise (MKL's dot and matrix products do). torch begins
its own memory on a boundary. A view of a part of it may begin anywhere, such as a parameter that
`vector_to_parameters` cut from a vector, or a kept gradient, which is cut from that of all.

The place is counted from the beginning of that memory. What other programs allocated (an array of
NumPy) may begin anywhere, in each process elsewhere, and ranks would seem to have different states.

A value that is no tensor becomes JSON that says all of it, or is refused with its entry's name.

Tensors are put aside by name, and the JSON refers to them. Flattening draws no random numbers and
changes nothing. A value whose type only pickle could keep is refused; so is an instance of a
subclass (a named tuple, an IntEnum, a defaultdict), which would come back as an instance of its
base class. The order of a dict is part of its value, but for what an object loads by name.
"""

import hashlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic.data.fingerprint import real_numbers
from elastic.errors import CheckpointDamaged, StateNotSavable
from elastic.proof.evidence import Evidence
from elastic.snapshot import checksum, image
from elastic.snapshot.division import CUT, Division
from elastic.snapshot.image import tensor_bytes, words_there
from elastic.snapshot.sharded import is_cut_by_rows, is_sharded, local, row_sums
from elastic.train.state.values import Values

BOUNDARY = 64  # bytes; torch's allocator of the CPU keeps it, and that of GPUs one of 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A flattened state: tensors by name, and the rest as one JSON value that refers to them.

    about: what stands beside the state and does not count in its digest. `layers` has for each
    module the versions of its layers, `alignments` those of tensors that do not begin on a
    boundary, `built` what the recipe built before the loop, and `now` its structure in the loop
    (built.py).
    """

    tensors: dict[str, Tensor]
    document: Any
    about: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All but the tensors, for the document of an image, which may hold more than this."""
        return {"state": self.document, "about": self.about}

    def own(self) -> "FlatState":
        """With this rank's rows in place of sharded tensors."""
        return replace(self, tensors={name: local(each) for name, each in self.tensors.items()})

    def part(self, number: int, of: int) -> "FlatState":
        """What a rank stores of a sharded state (snapshot/division.py)."""
        ties = image.ties(self.tensors)
        stored = {name: each for name, each in self.tensors.items() if name not in ties}
        uncut = [name for name, each in stored.items() if not is_sharded(each)]
        division = Division(
            of=of,
            number=number,
            owners={name: at % of for at, name in enumerate(uncut)},
            dtypes={name: image.DTYPES.get(each.dtype, "") for name, each in stored.items()},
            shapes={name: list(each.shape) for name, each in stored.items()},
            ties=ties,
        )
        tensors = {
            name: local(each)
            for name, each in self.tensors.items()
            if division.owners.get(ties.get(name, name), number) == number
        }
        return replace(self, tensors=tensors, about=self.about | {CUT: asdict(division)})

    @staticmethod
    def read(tensors: dict[str, Tensor], image_document: Any) -> "FlatState":
        """Raises CheckpointDamaged unless the document is that of an image of a state."""
        if isinstance(image_document, dict):
            state, about = image_document.get("state"), image_document.get("about", {})
            if isinstance(state, dict) and isinstance(about, dict):
                return FlatState(tensors=tensors, document=state, about=about)
        raise CheckpointDamaged("the payload is not a training state: its document lacks a state")

    @property
    def alignments(self) -> dict[str, int]:
        """By name, where it is not 0."""
        found: dict[str, int] = self.about.get("alignments", {})
        return found


def alignment(tensor: Tensor) -> int:
    """Bytes from the last boundary before its first element to that, in its memory."""
    return int(tensor.storage_offset()) * tensor.itemsize % BOUNDARY


def copy_at(tensor: Tensor, place: int) -> Tensor:
    """A copy of the same strides, but for gaps, in memory of its own, at the alignment
    `place`. place: bytes, a multiple of an element's.
    """
    like = torch.empty_like(tensor, requires_grad=False)
    if place and not is_sharded(tensor):
        first = place // tensor.itemsize
        memory = like.new_empty(first + tensor.numel())
        like = memory.as_strided(like.shape, like.stride(), first)
    return like.copy_(tensor.detach())


# Sums of numbers of all ranks, for each rank's.
Totals = Callable[[list[int]], list[int]]


def checksum_of(flat: FlatState, totals: Totals = lambda words: words) -> Evidence:
    """The same on every device, for every stride and address of the tensors.

    Of a sharded tensor it is that of this rank's rows, and with `totals`, which all ranks compute,
    that of the whole one, at every world size.
    """
    own = row_sums(flat.tensors)
    words = dict(zip(own, totals([*own.values()]), strict=True))
    entries = {}
    for name, tensor in flat.tensors.items():
        head = f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode()
        sums = str(words[name]).encode() if name in words else tensor_sums(tensor)
        entries[name] = hashlib.sha256(head + sums).hexdigest()
    for name, value in flat.document.items():
        entries[f"{name} (values)"] = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    return Evidence(entries)


def state_evidence(flat: FlatState, checksum: Evidence | None = None) -> Evidence:
    """The digest's contents, and modes, frozen parameters and parameter groups.

    checksum: of the state, for a caller that has it.
    """
    entries = dict((checksum or checksum_of(flat)).entries)
    for what, of_kind in flat.about.get("now", {}).items():
        named = of_kind if isinstance(of_kind, dict) else dict.fromkeys(of_kind, True)
        entries |= {f"{name} ({what})": json.dumps(value) for name, value in named.items()}
    return Evidence(entries)


def tensor_checksum(tensor: Tensor) -> str:
    """A checksum of a tensor's dtype, shape and bytes, where all NaNs count as one."""
    head = f"{tensor.dtype} {list(tensor.shape)}\n".encode()
    return hashlib.sha256(head + tensor_sums(real_numbers(tensor))).hexdigest()


def tensor_sums(tensor: Tensor) -> bytes:
    """`checksum.tensor_sums` of a tensor's bytes. On a GPU the same sums are computed there."""
    if tensor.device.type == "cpu" or tensor.nbytes <= checksum.SMALL_BYTES:
        return checksum.tensor_sums(tensor_bytes(tensor).numpy().data)
    flat = words_there(tensor)
    words, cut = checksum.stretch_words(flat.numel())
    stretches = flat[:cut].view(torch.int64).view(checksum.STRETCHES, words).sum(1)
    return stretches.cpu().numpy().tobytes() + flat[cut:].cpu().numpy().tobytes()


# By the name that the document has for them. torch's MultiStepLR has a Counter.
_LISTS: dict[str, Any] = {"list": list, "tuple": tuple}
_DICTS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_PLAIN = frozenset({type(None), bool, int, str})

# Objects that save their settings, and give them back in place of those that they were built with.
WITH_SETTINGS = (Optimizer, LRScheduler, torch.amp.GradScaler, Values)
# Those of torch move the tensors that they load to where they belong.
PLACES_TENSORS = WITH_SETTINGS[:-1]


def encode_value(thing: Any, value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """JSON of what an object's state_dict has given. Its tensors are added to `tensors`.

    Raises StateNotSavable with the name of the entry.
    """
    if not isinstance(thing, (nn.Module, Values)):
        return encode(value, name, tensors, has_properties=not isinstance(thing, PLACES_TENSORS))
    # A module moves the tensors that it loads to its own device; anything deeper inside is extra
    # state, which it gets as it was.
    _check_keys(value, name)

    def inner(key: str) -> Any:
        return encode(
            value[key],
            f"{name}.{key}",
            tensors,
            has_properties=not (type(value[key]) is Tensor or is_sharded(value[key])),
        )

    return {"dict": [[key, inner(key)] for key in sorted(value)]}


def encode(value: Any, path: str, tensors: dict[str, Tensor], *, has_properties: bool = True) -> Any:
    """JSON of a value. has_properties: of tensors, those that `with_properties` gives back.

    Raises StateNotSavable with the name of the entry.
    """
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter or is_sharded(value):  # most are, and each snapshot asks
        return {"tensor": _tensor(value, path, tensors, has_properties)}
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is np.float64:  # a learning rate that NumPy computed, perhaps
        return {"float64": encode(float(value), path, tensors)}

    def inner(item: Any, key: object) -> Any:
        return encode(item, f"{path}.{key}", tensors, has_properties=has_properties)

    if kind in _LISTS.values():
        return {kind.__name__: [inner(item, number) for number, item in enumerate(value)]}
    if kind in _DICTS.values():
        _check_keys(value, path)
        return {kind.__name__: [[key, inner(item, key)] for key, item in value.items()]}
    raise StateNotSavable(
        f"state entry {path}: expected tensors, numbers, strings, lists and dicts, found {kind.__module__}.{kind.__qualname__} (x), which only pickle could keep; "
        "give the tensors, numbers and strings in it, and make it of them in load_state_dict"
    )


def _check_keys(value: Any, path: str) -> None:
    for name in value:
        if type(name) not in (str, int):
            raise StateNotSavable(
                f"state entry {path}: expected str or int keys, found {type(name).__name__}; give a list of pairs, "
                "list(x.items()), in state_dict"
            )


def _tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor], has_properties: bool) -> Any:
    """Register the tensor under its path; marked with ' where two paths read alike.

    "a.b" in one dict and "b" in "a" do, and so do 0 and "0". Returns the name, with the properties
    that an object must find again if it keeps the tensor that it loads.
    """
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    if not is_dense or (has_properties and tensor.grad_fn is not None):
        found = f"part of a graph ({tensor.grad_fn.name()})" if tensor.grad_fn else tensor.layout
        raise StateNotSavable(
            f"state entry {path}: expected a dense tensor of its own, found one {'without values' if tensor.is_meta else found}; "
            "detach or convert it in state_dict, or leave a constant one out, as register_buffer(..., persistent=False) does"
        )
    if is_sharded(tensor) and not is_cut_by_rows(tensor):
        raise StateNotSavable(
            f"state entry {path}: expected a sharded tensor cut by rows as its module's parameters are, found a view or a part of one; "
            "keep x.full_tensor()"
        )
    while path in tensors:
        path += "'"
    tensors[path] = tensor
    if not has_properties:
        return path
    properties: dict[str, Any] = {}
    if tensor.device.type != "cpu":
        properties["device"] = tensor.device.type
    if type(tensor) is nn.Parameter:
        properties["parameter"] = True
    if tensor.requires_grad:
        properties["requires_grad"] = True
    return [path, properties] if properties else path


def layer_versions(module_state: Any) -> dict[str, dict[str, Any]]:
    """A module's `_metadata`: by layer, above all the version of its state.

    Without a version a layer takes its values for those of its oldest version, and converts or
    refuses them (torchvision's MNASNet does).
    """
    found = getattr(module_state, "_metadata", {})
    return {
        layer: {key: value for key, value in about.items() if type(value) in _PLAIN}
        for layer, about in found.items()
    }


def with_layer_versions(values: Any, versions: dict[str, dict[str, Any]]) -> Any:
    """The state of a module as its `state_dict` gave it."""
    found = OrderedDict(values)
    found._metadata = OrderedDict(versions)  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own name
    return found


# The tensor of this name, with the properties that it had: see `_tensor`.
TensorOf = Callable[[str, dict[str, Any]], Tensor]


def decode(value: Any, tensor_of: TensorOf) -> Any:
    """The value of such JSON. Raises CheckpointDamaged, or what Python raises, for any other."""
    if not isinstance(value, dict):
        return value
    (kind, content), *rest = value.items()
    if rest:
        raise CheckpointDamaged(f"expected one tagged value, found the keys {sorted(value)}")
    if kind == "tensor":
        return tensor_of(content, {}) if isinstance(content, str) else tensor_of(*content)
    if kind == "float":
        return float(content)
    if kind == "float64":
        return np.float64(decode(content, tensor_of))
    if kind in _DICTS:
        return _DICTS[kind]({name: decode(item, tensor_of) for name, item in content})
    if kind in _LISTS:
        return _LISTS[kind](decode(item, tensor_of) for item in content)
    raise CheckpointDamaged(f"expected a known kind of value, found {kind!r}")


def with_properties(tensor: Tensor, properties: dict[str, Any]) -> Tensor:
    """A tensor in the same memory, unless it was on another device, with these properties."""
    # A state that began on a GPU may begin a new run where there is none.
    if properties.get("device") == "cuda" and torch.cuda.is_available():
        tensor = tensor.to("cuda")
    requires_grad = bool(properties.get("requires_grad", False))
    if properties.get("parameter"):
        return nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.detach().requires_grad_(requires_grad)


def entries_of(value: Any) -> list[Any] | None:
    """[[name or number, value], ...] of what `encode` made of a dict or list; of others None."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    (kind, content), *_ = value.items()
    if kind in _LISTS:
        return [[number, item] for number, item in enumerate(content)]
    return content if kind in _DICTS else None
