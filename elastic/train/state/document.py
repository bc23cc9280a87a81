"""A value of a state becomes JSON that says all of it, or is refused with its entry's name.

Tensors are put aside by name, and the JSON refers to them. Flattening draws no random numbers and
changes nothing. A value whose type only pickle could keep is refused; so is an instance of a
subclass (a named tuple, an IntEnum, a defaultdict), which would come back as an instance of its
base class.

The order of a dict is kept, except in the objects of torch that do not depend on it: they pass
`Order.FREE`, and their dicts are sorted, so that a digest does not depend on the order of insertion
there.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastic.errors import CheckpointDamaged, StateNotSavable
from elastic.train.state.unsavable import advice

# By the name that the document has for them. torch's MultiStepLR has a Counter.
_LISTS: dict[str, Any] = {"list": list, "tuple": tuple}
_DICTS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_KINDS_OF_DICTS = frozenset(_DICTS.values())
_PLAIN = frozenset({type(None), bool, int, str})


class Order(Enum):
    """Whether the order of dicts counts.

    MODULE: in all but the outermost dict, which a module loads by name.
    """

    KEPT = "kept"
    MODULE = "module"
    FREE = "free"


def encode(value: Any, path: str, tensors: dict[str, Tensor], order: Order) -> Any:
    """JSON of a value. Its tensors are added to `tensors`.

    Raises StateNotSavable with the name of the entry.
    """
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:  # most are, and each snapshot asks
        return {"tensor": _tensor(value, path, tensors, order)}
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is np.float64:  # a learning rate that NumPy computed, perhaps
        return {"float64": encode(float(value), path, tensors, order)}
    if kind in _KINDS_OF_DICTS:
        return _dict(value, path, tensors, order)
    if kind is list or kind is tuple:
        return {kind.__name__: [encode(item, f"{path}.{i}", tensors, order) for i, item in enumerate(value)]}
    raise StateNotSavable(
        f"state entry {path}: expected tensors, numbers, strings, lists and dicts, found {kind.__module__}."
        f"{kind.__qualname__}, which only pickle could keep; with x for it: {advice(value)}"
    )


def _dict(value: Any, path: str, tensors: dict[str, Tensor], order: Order) -> dict[str, Any]:
    for name in value:
        if type(name) not in (str, int):
            raise StateNotSavable(
                f"state entry {path}: expected str or int keys, found {type(name).__name__}; give a list of pairs, "
                "list(x.items()), in state_dict, and dict(saved) of it in load_state_dict"
            )
    kind, is_module, names = type(value).__name__, hasattr(value, "_metadata"), list(value)
    if order is not Order.KEPT:
        # A module's state is an OrderedDict too. It is loaded by name, so its own order does not
        # count.
        kind = "dict" if is_module else kind
        if kind != "OrderedDict":
            names.sort(key=lambda name: (type(name) is str, name))  # ints before strings
    # A module moves the tensors that it loads to its own device; what is deeper inside is extra
    # state, which it gets as it was.
    is_of_module = order is Order.MODULE
    items = []
    for name in names:
        item = value[name]
        inner = Order.KEPT if is_of_module and type(item) is not Tensor else order
        items.append([name, encode(item, f"{path}.{name}", tensors, inner)])
    if order is Order.KEPT and is_module:
        return {"module": [items, layer_versions(value)]}
    return {kind: items}


def _tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor], order: Order) -> Any:
    """Register the tensor under its path; marked with ' where two paths read alike.

    "a.b" in one dict and "b" in "a" do, and so do 0 and "0". Returns the name, with the properties
    that an object must find again if it keeps the tensor that it loads.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        found = "one on the device meta, without values" if tensor.is_meta else tensor.layout
        raise StateNotSavable(
            f"state entry {path}: expected a dense tensor, found {found}; convert it in state_dict, or leave a constant "
            "one out of it, as register_buffer(..., persistent=False) does"
        )
    while path in tensors:
        path += "'"
    tensors[path] = tensor
    if order is not Order.KEPT:
        return path
    if tensor.grad_fn is not None:
        raise StateNotSavable(
            f"state entry {path}: expected a tensor of its own, found one that is part of a graph ({tensor.grad_fn.name()}), "
            "which cannot be kept; detach it in state_dict, or where it is computed"
        )
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
    if kind == "module":
        items, versions = content
        return with_layer_versions({name: decode(item, tensor_of) for name, item in items}, versions)
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
    return content[0] if kind == "module" else content if kind in _DICTS else None
