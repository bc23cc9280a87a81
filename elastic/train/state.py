"""State is everything that must survive; each value comes back with its type and its bits.

It is a set of objects with `state_dict`, flattened into tensors and one JSON document. Flattening
draws no random numbers and changes nothing. A value whose type only pickle could keep is refused
with the name of its entry; so is an instance of a subclass (a named tuple, an IntEnum, a
defaultdict), which would come back as an instance of its base class.

It does not keep the order of a dict (an OrderedDict has its own back), nor a tensor's strides and
its place in a graph. It does not promise that ranks hold the same state: they compare checksums
(consistency.py).
"""

import hashlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from elastic.errors import CheckpointDamaged, StateNotSavable, UsageError
from elastic.snapshot import checksum
from elastic.snapshot.image import tensor_bytes
from elastic.train import structure

# How an object's load_state_dict may say that a state is not its own.
LOAD_ERRORS = RuntimeError, LookupError, ArithmeticError, AttributeError, ValueError, TypeError
# By the name that the document has for them. torch's MultiStepLR has a Counter.
_LISTS: dict[str, Any] = {"list": list, "tuple": tuple}
_DICTS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A flattened state: tensors by name, and the rest as one JSON value that refers to them."""

    tensors: dict[str, Tensor]
    document: Any


class State:
    """The objects whose state is saved, restored and compared, each under its keyword's name.

    Models, optimizers, schedulers, EMA copies, GradScalers: any object with `state_dict` and
    `load_state_dict`. Raises UsageError for an object without them.
    """

    def __init__(self, **objects: Stateful) -> None:
        if not objects:
            raise UsageError("expected at least one object in State(model=..., optimizer=...), found none")
        for name, thing in objects.items():
            if not isinstance(thing, Stateful):
                raise UsageError(
                    f"State({name}=...): expected an object with state_dict and load_state_dict, found {type(thing).__name__}"
                )
        self.objects = objects

    @property
    def modules(self) -> list[nn.Module]:
        """Those among the objects, and those that other objects of the recipe hold."""
        return [thing for thing in self._held() if isinstance(thing, nn.Module)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [thing for thing in self._held() if isinstance(thing, torch.optim.Optimizer)]

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that an optimizer of this state updates, in the order of the modules.

        An optimizer of the recipe's own is an object that holds parameters. Without any optimizer
        among the objects, all parameters. Those of an EMA copy are not among them.
        """
        held = list(self._held())
        owned = structure.parameters(
            structure.submodules(thing for thing in held if isinstance(thing, nn.Module))
        )
        updated: dict[int, nn.Parameter] = {}
        for thing in held:
            if isinstance(thing, torch.optim.Optimizer):
                updated.update((id(p), p) for group in thing.param_groups for p in group["params"])
            elif isinstance(thing, nn.Parameter):
                updated[id(thing)] = thing
        if not updated:
            return list(owned.values())
        ordered = [p for name, p in owned.items() if name in updated]
        return ordered + [p for name, p in updated.items() if name not in owned]

    def name_of(self, parameter: Tensor) -> str:
        """Where a parameter or buffer is found, as `model.layers.0.weight`."""
        for name, thing in self.objects.items():
            for part in structure.held(thing):
                if isinstance(part, nn.Module):
                    for path, tensor in chain(part.named_parameters(), part.named_buffers()):
                        if tensor is parameter:
                            return f"{name}.{path}"
        return f"a parameter of shape {list(parameter.shape)} that no module of the State has"

    def updated_addresses(self) -> set[int]:
        """Addresses of the tensors that only `optimizer.step()` changes.

        They are those of trained parameters and of optimizer state.
        """
        states = [of_parameter for o in self.optimizers for of_parameter in o.state.values()]
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return {tensor.data_ptr() for tensor in [*self.trained, *tensors]}

    def _held(self) -> Iterator[Any]:
        for thing in self.objects.values():
            yield from structure.held(thing)

    def flatten(self) -> FlatState:
        """Tensors are references, not copies.

        Raises StateNotSavable with the name of the entry that needs pickle.
        """
        tensors: dict[str, Tensor] = {}
        document = {
            name: _encode(thing.state_dict(), name, tensors) for name, thing in sorted(self.objects.items())
        }
        return FlatState(tensors=dict(sorted(tensors.items())), document=document)

    def load(self, flat: FlatState) -> None:
        """Load every object. Each one's load_state_dict copies onto the object's own device.

        Raises CheckpointDamaged when the state is that of other objects.
        """
        if not isinstance(flat.document, dict) or flat.document.keys() != self.objects.keys():
            is_dict = isinstance(flat.document, dict)
            found = sorted(flat.document) if is_dict else type(flat.document).__name__
            raise CheckpointDamaged(
                f"expected the state of {sorted(self.objects)}, found that of {found}; "
                "the recipe's State must have the same entries as when the run began"
            )
        for name, thing in self.objects.items():
            try:
                self._load(name, thing, flat)
            except LOAD_ERRORS as error:
                raise CheckpointDamaged(f"{name} does not take the saved state: {error}") from error

    def _load(self, name: str, thing: Stateful, flat: FlatState) -> None:
        """`flat` may hold views of a slot that will be overwritten, so no object may keep them.

        Modules copy on load. That is verified, because a module may keep what it is given (as extra
        state, for instance). Every other object gets copies: optimizers do keep what they are
        given.
        """
        saved = flat.document[name]
        if isinstance(thing, nn.Module):
            thing.load_state_dict(_as_given_by(thing, _decode(saved, flat.tensors.__getitem__)))
            if not _keeps_any(thing, flat.tensors):
                return
        copies = _decode(saved, lambda tensor: flat.tensors[tensor].clone())
        thing.load_state_dict(_as_given_by(thing, copies))


def _as_given_by(thing: Stateful, values: Any) -> Any:
    """A module's values get the attribute `_metadata`, which holds its layers' versions.

    Without a version a layer takes the values for those of its oldest version, and converts or
    refuses them (torchvision's MNASNet does).
    """
    if isinstance(thing, nn.Module):
        values = OrderedDict(values)
        vars(values).update(getattr(thing.state_dict(), "__dict__", {}))
    return values


def _keeps_any(thing: Stateful, given: Mapping[str, Tensor]) -> bool:
    """Whether its state now holds memory that it was given."""
    held: dict[str, Tensor] = {}
    _encode(thing.state_dict(), "", held)
    return not _storages(held).isdisjoint(_storages(given))


def _storages(tensors: Mapping[str, Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChecksum:
    """Of the whole state and of each entry, in hexadecimal; checksum.py says what it is for."""

    whole: str
    entries: dict[str, str]


def checksum_of(flat: FlatState) -> StateChecksum:
    """The same on every device, for every stride and address of the tensors."""
    entries = {}
    for name, tensor in flat.tensors.items():
        head = f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode()
        entries[name] = hashlib.sha256(head + _sums(tensor)).hexdigest()
    for name, value in flat.document.items():
        entries[f"{name} (values)"] = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    whole = hashlib.sha256("".join(f"{k} {v}\n" for k, v in sorted(entries.items())).encode()).hexdigest()
    return StateChecksum(whole=whole, entries=entries)


def _sums(tensor: Tensor) -> bytes:
    """`checksum.tensor_sums` of a tensor's bytes. On a GPU the same sums are computed there."""
    if tensor.device.type == "cpu" or tensor.nbytes <= checksum.SMALL_BYTES:
        return checksum.tensor_sums(tensor_bytes(tensor).numpy().data)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words, cut = checksum.stretch_words(flat.numel())
    stretches = flat[:cut].view(torch.int64).view(checksum.STRETCHES, words).sum(1)
    return stretches.cpu().numpy().tobytes() + flat[cut:].cpu().numpy().tobytes()


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is np.float64:  # a learning rate that NumPy computed, perhaps
        return {"float64": _encode(float(value), path, tensors)}
    if kind in (Tensor, nn.Parameter):
        return {"tensor": _name(value, path, tensors)}
    if kind in _DICTS.values():
        for name in value:
            if type(name) not in (str, int):
                raise StateNotSavable(
                    f"state entry {path}: expected str or int keys, found {type(name).__name__}"
                )
        # A module's state is an OrderedDict too, but has no order: it is loaded by name.
        tag = "dict" if hasattr(value, "_metadata") else kind.__name__
        # Sorted (ints before strings), so that the digest does not depend on the order of
        # insertion, which a resume changes.
        names = list(value) if tag == "OrderedDict" else sorted(value, key=lambda n: (type(n) is str, n))
        return {tag: [[name, _encode(value[name], f"{path}.{name}", tensors)] for name in names]}
    if kind in _LISTS.values():
        return {kind.__name__: [_encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]}
    raise StateNotSavable(
        f"state entry {path}: expected tensors, numbers, strings, lists and dicts, found {kind.__module__}."
        f"{kind.__qualname__}, which only pickle could keep; leave it out of state_dict or turn it into one of these"
    )


def _name(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Register the tensor under its path; marked with ' where two paths read alike.

    "a.b" in one dict and "b" in "a" do, and so do 0 and "0".
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise StateNotSavable(
            f"state entry {path}: expected a dense tensor, found {tensor.layout}; convert it in state_dict"
        )
    while path in tensors:
        path += "'"
    tensors[path] = tensor
    return path


def _decode(value: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, content), *rest = value.items()
    if rest:
        raise CheckpointDamaged(f"expected one tagged value, found the keys {sorted(value)}")
    if kind == "tensor":
        return tensor_of(content)
    if kind == "float":
        return float(content)
    if kind == "float64":
        return np.float64(_decode(content, tensor_of))
    if kind in _DICTS:
        return _DICTS[kind]({name: _decode(item, tensor_of) for name, item in content})
    if kind in _LISTS:
        return _LISTS[kind](_decode(item, tensor_of) for item in content)
    raise CheckpointDamaged(f"expected a known kind of value, found {kind!r}")
