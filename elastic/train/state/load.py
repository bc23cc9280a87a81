"""An object's load_state_dict gets what its state_dict gave; what it changes by it is put back.

It keeps nothing of the memory that the state lies in. Tensors that shared all their memory when
they were saved share it again: an object of the recipe may keep the model's parameters without a
copy, and they change with the model's then, after a restart as before it.

It does not promise that the object then has the state that was saved: `difference` tells. Names
that a recipe holds for parts of an object belong to it after the load only where the object is
torch's own, or loads in place. Every run loads what it built before its first step, so that such a
name is stale in a calm run and after a restart alike.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic.errors import CheckpointDamaged, StateDoesNotFit
from elastic.proof.evidence import Evidence, differences
from elastic.snapshot import image
from elastic.snapshot.sharded import is_sharded, local
from elastic.train.state import structure
from elastic.train.state.flat import (
    PLACES_TENSORS,
    FlatState,
    TensorOf,
    alignment,
    copy_at,
    decode,
    encode_value,
    entries_of,
    layer_versions,
    with_layer_versions,
    with_properties,
)
from elastic.train.state.values import refilled

SHOWN_DIGITS = 32  # of a tensor's checksum
# How an object's load_state_dict may say that a state is not its own.
LOAD_ERRORS = RuntimeError, LookupError, ArithmeticError, AttributeError, ValueError, TypeError


class SharedCopies:
    """Gives each saved tensor to the objects that load it: a copy, the same one to each that shared
    its memory.

    live: tensors that are where they belong, by the name under which they were saved.
    """

    def __init__(self, flat: FlatState, live: Mapping[str, Tensor]) -> None:
        self._flat = flat
        self._first = image.ties(flat.tensors)
        self._live = {self._first.get(name, name): tensor for name, tensor in live.items()}
        self._given: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, name: str, properties: dict[str, Any]) -> Tensor:
        """Raises KeyError."""
        first = self._first.get(name, name)
        wanted = first, *sorted(properties.items())
        if wanted not in self._given:
            if first not in self._live:
                self._live[first] = copy_at(self._flat.tensors[first], self._flat.alignments.get(first, 0))
            live = self._live[first]
            has_kind = isinstance(live, nn.Parameter) == bool(properties.get("parameter"))
            has_flag = live.requires_grad == bool(properties.get("requires_grad", False))
            self._given[wanted] = live if has_kind and has_flag else with_properties(live, properties)
        return self._given[wanted]


def load_module(name: str, module: nn.Module, flat: FlatState) -> None:
    """A module copies its own tensors on a load; what else its state has, it is given as copies.

    Raises StateDoesNotFit when the module refuses the state, CheckpointDamaged when it is none.
    """
    had = {entry: local(tensor).data_ptr() for entry, tensor in own_tensors(name, module).items()}

    def given(entry: str, properties: dict[str, Any]) -> Tensor:
        saved = flat.tensors[entry]
        return saved if entry in had else with_properties(saved.clone(), properties)

    with _refusals(name):
        value = _decoded(name, flat, given)
        versions = flat.about.get("layers", {}).get(name) or layer_versions(module.state_dict())
        module.load_state_dict(with_layer_versions(value, versions))
    # A change of the tensors in its state_dict would not reach it.
    now = own_tensors(name, module)
    for entry, tensor in now.items():
        saved = flat.tensors.get(entry)
        # An object that has taken the memory of the saved tensor, by assign=True, would lose it.
        if saved is not None and local(tensor).data_ptr() == local(saved).data_ptr() != had.get(entry):
            _share(tensor, saved.clone())
    _put_back(now, flat, has_own_dtypes=True)


def load_stateful(name: str, thing: Any, flat: FlatState, copies: SharedCopies) -> None:
    """Everything that is no module gets copies: optimizers do keep what they are given.

    Raises as `load_module` does.
    """
    parts = [each for each in structure.held(thing) if isinstance(each, Optimizer | LRScheduler)]
    before = [dict(vars(part)) for part in parts]
    with _refusals(name):
        thing.load_state_dict(_decoded(name, flat, copies))
    held: dict[str, Tensor] = {}
    encode_value(thing, thing.state_dict(), name, held)
    _put_back(held, flat, has_own_dtypes=False)
    for part, had in zip(parts, before, strict=True):
        attributes = vars(part)
        for key in had.keys() & attributes.keys():
            attributes[key] = refilled(had[key], attributes[key], _share)


def _share(tensor: Any, other: Any) -> None:
    if is_sharded(tensor):  # whose `.data` is no way to it
        tensor._local_tensor, tensor._spec = local(other), other._spec  # noqa: SLF001
    else:
        tensor.data = other.data


def sharded_like(
    shapes: Mapping[str, Sequence[int]],
    were_sharded: Iterable[str],
    live: Mapping[str, Tensor],
    objects: Mapping[str, Any],
) -> dict[str, Any]:
    """By name, for each saved tensor that these objects hold sharded, one that is sharded so.

    shapes: of all saved tensors. live: those that the objects have now; others may not be there
    yet, and are sharded if they were. Of a run that was not, an optimizer's state of the shape
    of a sharded parameter is sharded as that is.
    """
    were = set(were_sharded)
    like: dict[str, Any] = {entry: tensor for entry, tensor in live.items() if is_sharded(tensor)}
    any_one = next(iter(like.values()), None)
    if any_one is not None:
        like |= dict.fromkeys(were - live.keys(), any_one)
    modules = ((name, thing) for name, thing in objects.items() if isinstance(thing, nn.Module))
    names = {id(p): entry for each in modules for entry, p in own_tensors(*each).items()}
    for name, thing in objects.items():
        if isinstance(thing, Optimizer):
            owners = (p for group in thing.param_groups for p in group["params"])
            of_each = {f"{name}.state.{number}": p for number, p in enumerate(owners)}
            for entry in shapes:
                if (p := of_each.get(entry.rpartition(".")[0])) is not None:
                    # Of a parameter that was sharded, what was whole stays so, of whichever shape.
                    is_own = entry in were or names.get(id(p)) not in were
                    if is_own and list(p.shape) == list(shapes[entry]):
                        like[entry] = p
    return {entry: each for entry, each in like.items() if entry in shapes and is_sharded(each)}


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


def _decoded(name: str, flat: FlatState, tensor_of: TensorOf) -> Any:
    try:
        return decode(flat.document[name], tensor_of)
    except LOAD_ERRORS as error:
        raise CheckpointDamaged(f"the saved state of {name} makes no sense: {error}") from error


def _put_back(held: Mapping[str, Tensor], flat: FlatState, *, has_own_dtypes: bool) -> None:
    """Give the tensors that an object now has the strides that were saved, dtypes and alignments.

    A module keeps the dtype of its parameters, which is the recipe's choice. An optimizer casts
    what it loads to the dtype of its parameters, and thereby rounds float32 state of bfloat16
    parameters (NAdam's mu_product, ASGD's eta). It keeps the strides of what it loads, a module
    those that it was built with, and the memory.
    """
    for entry, tensor in held.items():
        before = flat.tensors.get(entry)
        if before is None or before.shape != tensor.shape:
            continue
        is_cast = tensor.dtype != before.dtype and not has_own_dtypes
        if is_sharded(tensor):
            if is_cast:
                _share(tensor, before.to(tensor.device).clone())
            continue
        # Another tensor that is a view of the same memory would be left behind by a new one.
        has_all_its_memory = tensor.untyped_storage().nbytes() == tensor.nbytes
        place = flat.alignments.get(entry, 0)
        if is_cast or (_strides(tensor) != _strides(before) and has_all_its_memory):
            dtype = before.dtype if is_cast else tensor.dtype
            tensor.data = copy_at(before.to(device=tensor.device, dtype=dtype), place)
        elif alignment(tensor) != place and _is_alone(tensor):
            tensor.data = copy_at(tensor, place)


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """None where they are row-major."""
    return image.dense_strides(tensor.shape, tensor.stride())


def _is_alone(tensor: Tensor) -> bool:
    """Whether no other tensor uses its memory; its base is no other tensor."""
    return _references(tensor) == _ONE_REFERENCE + (tensor._base is not None)  # noqa: SLF001


def contents(flat: FlatState, checksum: Evidence, objects: Mapping[str, Any]) -> Evidence:
    """What a load must give back, in a form that stays true when the tensors themselves change: a
    load of what was built writes into the very tensors that it loads from.
    """
    # Schedules have an optimizer's learning rate, if it is a tensor, under several names until a
    # load makes copies.
    shares = {name for name, each in objects.items() if not isinstance(each, PLACES_TENSORS)}
    tied = image.ties({name: each for name, each in flat.tensors.items() if name.split(".")[0] in shares})
    try:
        entries = dict(each for name, value in flat.document.items() for each in _leaves(name, value))
    except LOAD_ERRORS as error:
        raise CheckpointDamaged(f"the saved state makes no sense: {error}") from error
    for name, each in flat.tensors.items():
        numbers, form = checksum.entries[name][:SHOWN_DIGITS], f"{each.dtype} {list(each.shape)}"
        strides, memory = _strides(each) or "row-major", tied.get(name, "its own")
        entries[f"the tensor {name}"] = f"{numbers} {form}, strides {strides}, memory of {memory}"
    return Evidence(entries)


def difference(saved: Evidence, found: Evidence) -> str:
    """The first entry that differs, as a phrase that says how; "" where none does."""
    for name in differences(saved, found)[:1]:
        before, now = (each.entries.get(name, "nothing") for each in (saved, found))
        return f"{name}: saved {before:.160}; now {now:.160}"
    return ""


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """(path, text) of each value of a document, and of each dict or list that holds more of them.

    JSON tells 0.0 from -0.0, and True from 1.
    """
    inner = entries_of(value)
    if inner is None or not any(isinstance(item, dict) for _, item in inner):
        yield path, json.dumps(value)
        return
    yield path, f"{next(iter(value))} {[name for name, _ in inner]}"
    for name, item in inner:
        yield from _leaves(f"{path}.{name}", item)


def _references(tensor: Tensor) -> int:
    """How many tensors use this one's memory, more or less: compare with _ONE_REFERENCE."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # noqa: SLF001


_ONE_REFERENCE = _references(torch.empty(1))
