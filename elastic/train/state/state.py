"""State is everything that must survive; each value comes back as it was: type, bits, order.

It is a set of objects with `state_dict`, flattened into tensors and one JSON document
(state_document.py). A tensor also has its dtype, its strides and its alignment back, where an
object's load_state_dict would change them (loading.py): kernels choose by them, and may round
differently.

It does not keep the gaps of a view between its elements. It does not promise that ranks hold the
same state: they compare checksums (consistency.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from elastic.errors import StateDoesNotFit, UsageError
from elastic.snapshot.image import layout
from elastic.train.misuse import public
from elastic.train.state import built as as_built
from elastic.train.state import reshaped, structure
from elastic.train.state.alignment import alignments, misplaced
from elastic.train.state.built import Built, StructureReader
from elastic.train.state.document import Order, encode, layer_versions
from elastic.train.state.flat import VERSION, FlatState, StateChecksum, checksum_of
from elastic.train.state.key_order import key_orders
from elastic.train.state.load import SavedObject, load_module, load_stateful, order_of, own_tensors
from elastic.train.state.same_objects import SameObjects
from elastic.train.state.shared_memory import SharedCopies
from elastic.train.state.state_contents import StateContents, contents, difference
from elastic.train.state.unsavable import advice_for_entry, check_built


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class State:
    """The objects whose state is saved, restored and compared, each under its keyword's name.

    Models, optimizers, schedulers, EMA copies, GradScalers: any object with `state_dict` and
    `load_state_dict`. Raises UsageError for an object without them.
    """

    # Without a dict: an attribute that a recipe adds would be saved by no state.
    __slots__ = (
        *("objects", "ignored", "misplaced", "held", "_built", "_shapes", "_structure", "_tree"),
        *("_updated", "_trained"),
    )

    @public("elastic.State")
    def __init__(self, **objects: Stateful) -> None:
        if not objects:
            raise UsageError("expected at least one object in State(model=..., optimizer=...), found none")
        for name, thing in objects.items():
            if not isinstance(thing, Stateful):
                raise UsageError(
                    f"State({name}=...): expected an object with state_dict and load_state_dict, found {type(thing).__name__}; "
                    f"{advice_for_entry(name, thing)}"
                )
            check_built(name, thing)
        self.objects: Mapping[str, Stateful] = MappingProxyType(objects)
        # Settings of the recipe without effect, because those that were saved are in force.
        self.ignored: list[str] = []
        # Entries that begin elsewhere in their memory than when they were saved (alignment.py).
        self.misplaced: list[str] = []
        self._built: Built | None = None  # None until the loop begins
        self._shapes: dict[str, tuple[int, ...]] | None = None  # of modules' tensors; likewise
        self._structure = StructureReader(objects)
        self._tree = structure.Tree()
        # By optimizers of torch, and of the recipe's own, when they were last asked for.
        self._updated: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        # Of the trained ones, those that an optimizer of torch holds, likewise. Do not change it.
        self.held: list[nn.Parameter] = []
        # What `trained_and_idle` made of that, and of the modules' parameters.
        self._trained: tuple[dict[int, nn.Parameter], list[nn.Parameter], list[nn.Parameter]] = {}, [], []

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

    def parameters(self) -> list[nn.Parameter]:
        """Of the modules, each once, and those that optimizers update beside them."""
        trained, idle = self.trained_and_idle()
        return [*trained, *idle]

    def submodules(self) -> list[nn.Module]:
        """The modules and all inside them, each once. Do not change the list."""
        return self._tree.modules(self.modules)

    def parts(self) -> structure.StateParts:
        """As they are now."""
        return self._tree.parts([each for each in self._held() if isinstance(each, structure.COMPUTED_WITH)])

    def trained_and_idle(
        self, parts: structure.StateParts | None = None
    ) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters that are trained, and those of the modules that no optimizer updates.

        parts: as they are now, for a caller that has them. Where neither has changed since the last
        call, the lists are that call's own. Do not change them.
        """
        parts = parts or self.parts()
        owned = parts.owned
        held: list[nn.Parameter] = []
        by_objects: list[nn.Parameter] = []
        for thing in parts.held:
            if isinstance(thing, torch.optim.Optimizer):
                held += chain.from_iterable(group["params"] for group in thing.param_groups)
            elif isinstance(thing, nn.Parameter):
                by_objects.append(thing)
        updated = held, by_objects
        known, trained, idle = self._trained
        if known is not owned or not all(map(structure.same, updated, self._updated)):
            trained, idle = _trained_and_idle(owned, {id(p): p for p in (*held, *by_objects)})
            names = frozenset(map(id, held))
            self.held = [p for p in trained if id(p) in names]
            self._updated, self._trained = updated, (owned, trained, idle)
        return trained, idle

    def name_of(self, parameter: Tensor) -> str:
        """Where a parameter or buffer is found, as `model.layers.0.weight`."""
        for name, module in self.named_modules():
            for path, tensor in chain(module._parameters.items(), module._buffers.items()):  # noqa: SLF001
                if tensor is parameter:
                    return f"{name}.{path}"
        return f"a parameter of shape {list(parameter.shape)} that no module of the State has"

    def name_of_place(self, holder: object, name: str) -> str:
        """The same, of the place `name` in a module's dict of parameters or of buffers."""
        for module_name, module in self.named_modules():
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

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
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
        if exact:
            about["alignments"] = alignments(tensors)
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

    def load(self, flat: FlatState) -> StateChecksum:
        """Load every object, and make sure that each then has the state that was saved.

        Returns its checksum, of which a second reading would cost as much as the load.

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
        checksum = checksum_of(flat)
        expected = self._contents(flat, checksum)
        for name, module in self._modules.items():
            load_module(module, saved_entry(flat, name))
        self._take_structure(flat)
        self.load_others(flat, self.objects, {})
        loaded = self.flatten(exact=flat.is_exact)
        self.misplaced = misplaced(flat.alignments, loaded.alignments)
        if found := difference(expected, self.contents(loaded), is_exact=flat.is_exact):
            self._check_dtypes(flat)
            raise StateDoesNotFit(
                f"load_state_dict does not bring it back; the first entry that differs is {found}"
            )
        return checksum

    def _check_dtypes(self, flat: FlatState) -> None:
        """Raises UsageError where an object copied what was saved into tensors of other dtypes."""
        now = self.flatten(exact=flat.is_exact).tensors
        for name, before in flat.tensors.items():
            after, entry = now.get(name), name.partition(".")[0]
            if (
                after is None
                or entry in self._modules
                or after.shape != before.shape
                or after.dtype == before.dtype
            ):
                continue
            was, is_now = (str(each.dtype).removeprefix("torch.") for each in (before, after))
            raise UsageError(
                f"{name} was saved as {was}, and is {is_now} after load_state_dict of {entry}, which copied it into a tensor of that type. If the steps make "
                f"it {was} (a product with a {was} tensor does), build it as {was}; or let load_state_dict take the saved tensor itself"
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
        copies = SharedCopies(flat.tensors, live, flat.alignments or {})
        of_all = (own_tensors("", module).values() for module in self.modules)
        untouchable = frozenset(id(tensor) for tensors in of_all for tensor in tensors)
        return {
            name: load_stateful(self.objects[name], saved_entry(flat, name), copies, untouchable)
            for name in names
            if name not in self._modules
        }

    def contents(self, flat: FlatState) -> StateContents:
        """What `flat`, a state of these objects, holds now."""
        return self._contents(flat, checksum_of(flat))

    def _contents(self, flat: FlatState, checksum: StateChecksum) -> StateContents:
        # Schedules have an optimizer's learning rate, if it is a tensor, under several names until
        # a load makes copies.
        shares = frozenset(name for name, each in self.objects.items() if order_of(each) is not Order.FREE)
        return contents(flat.document, checksum.entries, flat.tensors, shares)

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


def _trained_and_idle(
    owned: dict[int, nn.Parameter], updated: dict[int, nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """owned: by modules. updated: by optimizers. Both by id."""
    if not updated or owned.keys() == updated.keys():
        return list(owned.values()), []
    ordered = [p for name, p in owned.items() if name in updated]
    ordered += [p for name, p in updated.items() if name not in owned]
    return ordered, [p for name, p in owned.items() if name not in updated]


def saved_entry(flat: FlatState, name: str) -> SavedObject:
    """What a flattened state has of the object `name`."""
    return SavedObject(
        name=name,
        document=flat.document[name],
        tensors=flat.tensors,
        versions=flat.about.get("layers", {}).get(name),
        orders=flat.about.get("orders", {}).get(name, []),
        is_exact=flat.is_exact,
        alignments=flat.alignments,
    )


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "none"
