"""State is everything that must survive; each value comes back as it was: type, bits, order.

It is a set of objects with `state_dict`, flattened into tensors and one JSON document
(state_document.py). A tensor also has its dtype and its strides back, where an object's
load_state_dict would change them (loading.py): kernels choose by strides, and may round
differently.

It does not keep the gaps of a view between its elements. It does not promise that ranks hold the
same state: they compare checksums (consistency.py).
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from elastic.errors import CheckpointDamaged, StateDoesNotFit, UsageError
from elastic.snapshot import checksum
from elastic.snapshot.image import device_bytes, layout, tensor_bytes
from elastic.system.untrusted import decode as decode_fields
from elastic.train import as_built, reshaped, structure
from elastic.train.as_built import Built, Structure, StructureReader
from elastic.train.contents import Contents, contents, difference
from elastic.train.key_order import key_orders
from elastic.train.loading import SavedObject, load_module, load_object, order_of, own_tensors
from elastic.train.misuse import public
from elastic.train.same_objects import SameObjects
from elastic.train.shared_memory import SharedCopies
from elastic.train.state_document import Order, encode, layer_versions
from elastic.train.unsavable import advice_for_object

VERSION = 2  # 1 had neither the order of dicts nor strides, and not the versions of layers

T = TypeVar("T")


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A flattened state: tensors by name, and the rest as one JSON value that refers to them.

    about: what stands beside the state and does not count in its digest. `version` is that of the
    document, `layers` has for each module the versions of its layers, `orders` the orders of keys
    that the document does not have (key_order.py), `built` what the recipe built
    before the loop, and `now` its structure in the loop (as_built.py).
    """

    tensors: dict[str, Tensor]
    document: Any
    about: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All but the tensors, for the document of an image, which may hold more than this."""
        return {"state": self.document, "about": self.about}

    @staticmethod
    def read(tensors: dict[str, Tensor], image_document: Any) -> "FlatState":
        """Raises CheckpointDamaged unless the document is that of an image of a state."""
        if isinstance(image_document, dict):
            state, about = image_document.get("state"), image_document.get("about", {})
            if isinstance(state, dict) and isinstance(about, dict):
                return FlatState(tensors=tensors, document=state, about=about)
        raise CheckpointDamaged("the payload is not a training state: its document lacks a state")

    @property
    def is_exact(self) -> bool:
        return self.about.get("version") == VERSION

    @property
    def built(self) -> Built | None:
        """None of a state that earlier code saved. Raises CheckpointDamaged."""
        return self._read(Built, "built") if "built" in self.about else None

    @property
    def structure(self) -> Structure:
        """Raises CheckpointDamaged."""
        return self._read(Structure, "now")

    def _read(self, kind: type[T], key: str) -> T:
        try:
            return decode_fields(
                kind, self.about.get(key), what=f"the structure {key!r} of a state", exact=False
            )
        except ValueError as error:
            raise CheckpointDamaged(str(error)) from error


class State:
    """The objects whose state is saved, restored and compared, each under its keyword's name.

    Models, optimizers, schedulers, EMA copies, GradScalers: any object with `state_dict` and
    `load_state_dict`. Raises UsageError for an object without them.
    """

    @public("elastic.State")
    def __init__(self, **objects: Stateful) -> None:
        if not objects:
            raise UsageError("expected at least one object in State(model=..., optimizer=...), found none")
        for name, thing in objects.items():
            if not isinstance(thing, Stateful):
                raise UsageError(
                    f"State({name}=...): expected an object with state_dict and load_state_dict, found {type(thing).__name__}; "
                    f"{advice_for_object(name, thing)}"
                )
        self.objects = objects
        # Settings of the recipe without effect, because those that were saved are in force.
        self.ignored: list[str] = []
        self._built: Built | None = None  # None until the loop begins
        self._shapes: dict[str, tuple[int, ...]] | None = None  # of modules' tensors; likewise
        self._structure = StructureReader(objects)

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
        return self.trained_and_idle()[0]

    def trained_and_idle(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters that are trained, and those of the modules that no optimizer updates."""
        held = list(self._held())
        owned = structure.parameters(
            structure.submodules(thing for thing in held if isinstance(thing, nn.Module))
        )
        updated: dict[int, nn.Parameter] = {}
        for thing in held:
            if isinstance(thing, torch.optim.Optimizer):
                updated |= {id(p): p for group in thing.param_groups for p in group["params"]}
            elif isinstance(thing, nn.Parameter):
                updated[id(thing)] = thing
        if not updated or owned.keys() == updated.keys():
            return list(owned.values()), []
        ordered = [p for name, p in owned.items() if name in updated]
        ordered += [p for name, p in updated.items() if name not in owned]
        return ordered, [p for name, p in owned.items() if name not in updated]

    def name_of(self, parameter: Tensor) -> str:
        """Where a parameter or buffer is found, as `model.layers.0.weight`."""
        for name, module in self._named_modules():
            for path, tensor in chain(module._parameters.items(), module._buffers.items()):  # noqa: SLF001
                if tensor is parameter:
                    return f"{name}.{path}"
        return f"a parameter of shape {list(parameter.shape)} that no module of the State has"

    def name_of_place(self, holder: object, name: str) -> str:
        """The same, of the place `name` in a module's dict of parameters or of buffers."""
        for module_name, module in self._named_modules():
            if holder is module._parameters or holder is module._buffers:  # noqa: SLF001
                return f"{module_name}.{name}"
        return name

    def updated_addresses(self) -> set[int]:
        """Addresses of the tensors that only `optimizer.step()` changes.

        They are those of trained parameters and of optimizer state.
        """
        states = [of_parameter for o in self.optimizers for of_parameter in o.state.values()]
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return {tensor.data_ptr() for tensor in [*self.trained, *tensors]}

    @property
    def _modules(self) -> dict[str, nn.Module]:
        return {name: thing for name, thing in self.objects.items() if isinstance(thing, nn.Module)}

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, thing in self.objects.items():
            for part in structure.held(thing):
                if isinstance(part, nn.Module):
                    yield from part.named_modules(prefix=name)

    def _held(self) -> Iterator[Any]:
        for thing in self.objects.values():
            yield from structure.held(thing)

    def flatten(self, *, exact: bool = True) -> FlatState:
        """Tensors are references, not copies. exact: else as version 1 had it.

        Raises StateNotSavable with the name of the entry that needs pickle, or that has another
        shape than when the loop began.
        """
        tensors: dict[str, Tensor] = {}
        document, layers, orders = {}, {}, {}
        for name, thing in sorted(self.objects.items()):
            value, order = thing.state_dict(), order_of(thing) if exact else Order.FREE
            document[name] = encode(value, name, tensors, order)
            if order is Order.FREE and (found := key_orders(value)):
                orders[name] = found
            if isinstance(thing, nn.Module):
                layers[name] = layer_versions(value)
        if self._shapes is not None:
            reshaped.check(self._shapes, reshaped.shapes_of(tensors, self._modules), self._modules)
        about: dict[str, Any] = {"version": VERSION, "layers": layers, "orders": orders} if exact else {}
        if exact and self._built is not None:
            about |= {"built": self._built.to_json(), "now": self._structure.read().to_json()}
        return FlatState(tensors=dict(sorted(tensors.items())), document=document, about=about)

    def begin(self) -> Built:
        """To be called before anything is restored; returns what the recipe has built.

        Raises StateNotSavable.
        """
        self._shapes = None
        self.check_savable()
        self._shapes = reshaped.shapes_of(self.flatten().tensors, self._modules)
        self._built = as_built.as_built(self.objects)
        return self._built

    def check_savable(self) -> None:
        """Raises StateNotSavable with the name of an entry that cannot be kept."""
        layout(self.flatten().tensors, None)

    def load(self, flat: FlatState) -> None:
        """Load every object, and make sure that each then has the state that was saved.

        Each one's load_state_dict copies onto the object's own device. Raises StateDoesNotFit when
        the state is that of other objects, UsageError when an optimizer's parameters stand in
        another order than when it was saved, CheckpointDamaged when it is no state.
        """
        if flat.document.keys() != self.objects.keys():
            raise StateDoesNotFit(
                f"it has the entries {_listed(flat.document)}, and the recipe's State has {_listed(self.objects)}"
            )
        if self._built is not None and flat.built is not None:
            as_built.check_order(flat.built.groups, self._built.groups, "when the state was saved")
        expected = self.contents(flat)
        for name, module in self._modules.items():
            load_module(module, saved_object(flat, name))
        self._take_structure(flat)
        self.load_others(flat, self.objects, {})
        now = self.contents(self.flatten(exact=flat.is_exact))
        if found := difference(expected, now, is_exact=flat.is_exact):
            raise StateDoesNotFit(
                f"after load_state_dict the objects have another state; the first entry that differs is {found}"
            )

    def load_others(
        self, flat: FlatState, names: Iterable[str], live: Mapping[str, Tensor]
    ) -> dict[str, SameObjects]:
        """Load those of these objects that are no modules, once the modules are loaded.

        live: tensors, beside those of the modules, with which they may have shared memory. Raises
        as `load` does.
        """
        of_modules = (own_tensors(name, module) for name, module in self._modules.items())
        live = dict(live) | {entry: each for tensors in of_modules for entry, each in tensors.items()}
        copies = SharedCopies(flat.tensors, live)
        of_all = (own_tensors("", module).values() for module in self.modules)
        untouchable = frozenset(id(tensor) for tensors in of_all for tensor in tensors)
        return {
            name: load_object(self.objects[name], saved_object(flat, name), copies, untouchable)
            for name in names
            if name not in self._modules
        }

    def contents(self, flat: FlatState) -> Contents:
        """What `flat`, a state of these objects, holds now."""
        # Schedules have an optimizer's learning rate, if it is a tensor, under several names until
        # a load makes copies.
        shares = frozenset(name for name, each in self.objects.items() if order_of(each) is not Order.FREE)
        return contents(flat.document, checksum_of(flat).entries, flat.tensors, shares)

    def _take_structure(self, saved: FlatState) -> None:
        """What the recipe's loop had made of what was built: groups, frozen parameters, modes."""
        built = saved.built
        if self._built is None or built is None:
            return
        now = saved.structure
        as_built.add_groups(self.objects, self._built.groups, now.groups)
        if built.frozen == self._built.frozen:  # else the recipe was edited, and means it
            as_built.freeze(self.objects, now.frozen)
        if built.evaluating == self._built.evaluating:
            as_built.set_modes(self.objects, now.evaluating)
        self.ignored = as_built.changes(built.settings, self._built.settings)


def saved_object(flat: FlatState, name: str) -> SavedObject:
    """What a flattened state has of the object `name`."""
    return SavedObject(
        name=name,
        document=flat.document[name],
        tensors=flat.tensors,
        versions=flat.about.get("layers", {}).get(name),
        orders=flat.about.get("orders", {}).get(name, []),
        is_exact=flat.is_exact,
    )


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "none"


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
        entries[name] = hashlib.sha256(head + tensor_sums(tensor)).hexdigest()
    for name, value in flat.document.items():
        entries[f"{name} (values)"] = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    whole = hashlib.sha256("".join(f"{k} {v}\n" for k, v in sorted(entries.items())).encode()).hexdigest()
    return StateChecksum(whole=whole, entries=entries)


def tensor_sums(tensor: Tensor) -> bytes:
    """`checksum.tensor_sums` of a tensor's bytes. On a GPU the same sums are computed there."""
    if tensor.device.type == "cpu" or tensor.nbytes <= checksum.SMALL_BYTES:
        return checksum.tensor_sums(tensor_bytes(tensor).numpy().data)
    flat = device_bytes(tensor)
    words, cut = checksum.stretch_words(flat.numel())
    stretches = flat[:cut].view(torch.int64).view(checksum.STRETCHES, words).sum(1)
    return stretches.cpu().numpy().tobytes() + flat[cut:].cpu().numpy().tobytes()
