"""An object's load_state_dict gets what its state_dict gave; what it changes by it is put back.

It keeps nothing of the memory that the state lies in, and its parts stay the same objects
(same_objects.py). It does not promise that the object then has the state that was saved: state.py
compares.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elastic.errors import CheckpointDamaged, StateDoesNotFit
from elastic.reduce.bucket import ONE_REFERENCE, references
from elastic.snapshot.image import dense_strides
from elastic.train.state.alignment import alignment, copy_at
from elastic.train.state.built import WITH_SETTINGS
from elastic.train.state.document import (
    Order,
    TensorOf,
    decode,
    encode,
    layer_versions,
    with_layer_versions,
    with_properties,
)
from elastic.train.state.key_order import in_order
from elastic.train.state.same_objects import SameObjects
from elastic.train.state.shared_memory import SharedCopies
from elastic.train.state.values import Values

# How an object's load_state_dict may say that a state is not its own.
LOAD_ERRORS = RuntimeError, LookupError, ArithmeticError, AttributeError, ValueError, TypeError


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedObject:
    """What was saved of the object `name`.

    tensors: of all objects, perhaps views of a slot that will be overwritten. versions: of a
    module's layers, None if not known. orders: of keys that the document does not have
    (key_order.py). is_exact: the strides and the order of dicts are those that were saved.
    alignments: where it is not 0, of all objects' tensors; None if not known.
    """

    name: str
    document: Any
    tensors: Mapping[str, Tensor]
    versions: Any
    orders: Any
    is_exact: bool
    alignments: Mapping[str, int] | None


def order_of(thing: Any) -> Order:
    if isinstance(thing, (nn.Module, Values)):  # loaded by name
        return Order.MODULE
    return Order.FREE if isinstance(thing, WITH_SETTINGS) else Order.KEPT


def load_module(module: nn.Module, saved: SavedObject, *, is_trial: bool = False) -> None:
    """Modules copy on load, which is verified: one may keep what it is given, as extra state.

    is_trial: the state lies in the module's own memory, so that nothing is verified.

    Raises StateDoesNotFit when the module refuses the state, CheckpointDamaged when it is none.
    """
    tensors = saved.tensors
    with _refusals(saved.name):
        module.load_state_dict(_decoded(module, saved, lambda name, about: _with(tensors[name], about)))
        if not is_trial and _keeps_any(module, tensors):
            module.load_state_dict(
                _decoded(module, saved, lambda name, about: _with(tensors[name].clone(), about))
            )
    _put_back(module, saved)


def load_stateful(
    thing: Any, saved: SavedObject, copies: SharedCopies, untouchable: frozenset[int]
) -> SameObjects:
    """Everything that is no module gets copies: optimizers do keep what they are given.

    untouchable: as in `SameObjects`. Raises as `load_module` does.
    """
    parts = SameObjects(thing, untouchable)
    with _refusals(saved.name):
        thing.load_state_dict(_decoded(thing, saved, copies))
    _put_back(thing, saved)
    parts.put_back()
    return parts


def has_own_load(thing: Any) -> bool:
    """Whether its class has another load_state_dict than those of torch."""
    return not type(thing).load_state_dict.__module__.startswith("torch.")


def own_tensors(name: str, module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers, where its state has them detached."""
    parameters = module.named_parameters(prefix=name, remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(prefix=name, remove_duplicate=False))}


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, CheckpointDamaged):
        raise  # the first is the machine's failure; a restart may help
    except LOAD_ERRORS as error:
        raise StateDoesNotFit(f"{name} does not take it: {error}") from error


def _with(tensor: Tensor, properties: dict[str, Any]) -> Tensor:
    return with_properties(tensor, properties) if properties else tensor


def _decoded(thing: Any, saved: SavedObject, tensor_of: TensorOf) -> Any:
    try:
        value = in_order(decode(saved.document, tensor_of), saved.orders)
        if isinstance(thing, nn.Module):
            return with_layer_versions(value, saved.versions or layer_versions(thing.state_dict()))
    except LOAD_ERRORS as error:
        raise CheckpointDamaged(f"the saved state of {saved.name} makes no sense: {error}") from error
    return value


def _put_back(thing: Any, saved: SavedObject) -> None:
    """Give the tensors that an object now has the strides that were saved, dtypes and alignments.

    A module keeps the dtype of its parameters, which is the recipe's choice. An optimizer casts
    what it loads to the dtype of its parameters, and thereby rounds float32 state of bfloat16
    parameters (NAdam's mu_product, ASGD's eta). It keeps the strides of what it loads, a module
    those that it was built with, and the memory.
    """
    held: dict[str, Tensor] = {}
    is_module = isinstance(thing, nn.Module)
    if isinstance(thing, nn.Module):
        # A change of those in its state_dict would not reach it.
        held = own_tensors(saved.name, thing)
    else:
        encode(thing.state_dict(), saved.name, held, order_of(thing) if saved.is_exact else Order.FREE)
    for entry, tensor in held.items():
        before = saved.tensors.get(entry)
        if before is None or before.shape != tensor.shape:
            continue
        is_cast = tensor.dtype != before.dtype and not is_module
        is_laid_out_otherwise = (
            saved.is_exact and strides_differ(tensor, before) and _has_all_its_memory(tensor)
        )
        place = alignment(tensor) if saved.alignments is None else saved.alignments.get(entry, 0)
        if is_cast or is_laid_out_otherwise:
            dtype = before.dtype if is_cast else tensor.dtype
            tensor.data = copy_at(before.to(device=tensor.device, dtype=dtype), place)
        elif alignment(tensor) != place and _is_alone(tensor):
            tensor.data = copy_at(tensor, place)


def strides_differ(one: Tensor, other: Tensor) -> bool:
    return dense_strides(one.shape, one.stride()) != dense_strides(other.shape, other.stride())


def _has_all_its_memory(tensor: Tensor) -> bool:
    """No other tensor is a view of the same memory, which a new one would leave behind."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _is_alone(tensor: Tensor) -> bool:
    """Whether no other tensor uses its memory; the one that it was cut from is no other's."""
    return references(tensor) == ONE_REFERENCE + (tensor._base is not None)  # noqa: SLF001


def _keeps_any(thing: Any, given: Mapping[str, Tensor]) -> bool:
    """Whether its state now holds memory that it was given."""
    held: dict[str, Tensor] = {}
    encode(thing.state_dict(), "", held, Order.FREE)
    return not _storages(held).isdisjoint(_storages(given))


def _storages(tensors: Mapping[str, Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()}
