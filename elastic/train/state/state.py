"""State is everything that must survive; each value comes back as it was: type, bits, order.

It is a set of objects with `state_dict`, flattened into tensors and one JSON document
(flat.py). A tensor also has its dtype, its strides and its alignment back, where an object's
load_state_dict would change them (load.py): kernels choose by them, and may round differently.

It does not keep the gaps of a view between its elements. It does not promise that ranks hold the
same state: they compare checksums (proof/agreement.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from elastic.errors import CheckpointDamaged, StateDoesNotFit, StateNotSavable, UsageError
from elastic.proof.evidence import Evidence
from elastic.snapshot.image import layout
from elastic.snapshot.sharded import is_sharded, local
from elastic.train.misuse import public
from elastic.train.sharded.modules import ShardedModules
from elastic.train.state import built, load, structure
from elastic.train.state.flat import (
    WITH_SETTINGS,
    FlatState,
    alignment,
    checksum_of,
    encode_value,
    layer_versions,
    state_evidence,
)


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
    __slots__ = (*("objects", "ignored", "_built", "_shapes", "_parts", "_are_alone", "sharded"),)

    @public("elastic.State")
    def __init__(self, **objects: Stateful) -> None:
        if not objects:
            raise UsageError("expected at least one object in State(model=..., optimizer=...), found none")
        for name, thing in objects.items():
            if not isinstance(thing, Stateful) or type(thing).__module__.startswith("torch.jit"):
                raise UsageError(
                    f"State({name}=...): expected an object with state_dict and load_state_dict, found {type(thing).__name__}; give numbers in "
                    f"elastic.Values({name}=...), parameters in a module without torch.jit, each object a name, or add the methods"
                )
        self.objects: Mapping[str, Stateful] = MappingProxyType(objects)
        self.sharded: ShardedModules | None = None  # by run.fully_shard
        # Settings of the recipe without effect, because those that were saved are in force.
        self.ignored: list[str] = []
        self._built: built.Structure | None = None  # None until the loop begins
        self._shapes: dict[str, tuple[int, ...]] = {}  # of modules' tensors, where the loop began
        # Whether none of the objects may hold others, so that no walk has to look for them.
        self._are_alone = all(isinstance(each, (nn.Module, *WITH_SETTINGS)) for each in objects.values())
        self._parts: structure.Parts | None = None  # when they were last asked for

    @property
    def modules(self) -> list[nn.Module]:
        """Those among the objects, and those that other objects of the recipe hold."""
        return [thing for thing in self.held() if isinstance(thing, nn.Module)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [thing for thing in self.held() if isinstance(thing, torch.optim.Optimizer)]

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that an optimizer of this state updates, in the order of the modules."""
        return self.parts().trained

    def parts(self) -> structure.Parts:
        """What the objects consist of now: the former answer where nothing has changed."""
        known = self._parts
        if known is not None and self._are_alone and not known.has_changed():
            return known
        found = [each for each in self.held() if isinstance(each, structure.COMPUTED_WITH)]
        if known is None or not structure.same(found, known.found) or known.has_changed():
            self._parts = known = structure.Parts(found)
        return known

    def name_of(self, parameter: Tensor) -> str:
        """Where a parameter or buffer is found, as `model.layers.0.weight`."""
        for name, module in self.named_modules():
            for path, tensor in chain(module._parameters.items(), module._buffers.items()):  # noqa: SLF001
                if tensor is parameter:
                    return f"{name}.{path}"
        return f"a parameter of shape {list(parameter.shape)} that no module of the State has"

    def name_of_place(self, holder: object, name: str) -> str:
        """The same, of the place `name` in a module's dict of buffers."""
        names = (path for path, module in self.named_modules() if module._buffers is holder)  # noqa: SLF001
        return f"{next(names)}.{name}"

    def updated_addresses(self) -> set[int]:
        """Addresses of the tensors that only `optimizer.step()` changes.

        They are those of trained parameters and of optimizer state.
        """
        states = [of_parameter for o in self.optimizers for of_parameter in o.state.values()]
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return {local(tensor).data_ptr() for tensor in [*self.trained, *tensors]}

    @property
    def _modules(self) -> dict[str, nn.Module]:
        return {name: thing for name, thing in self.objects.items() if isinstance(thing, nn.Module)}

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, thing in self.objects.items():
            for part in structure.held(thing):
                if isinstance(part, nn.Module):
                    yield from part.named_modules(prefix=name)

    def held(self) -> Iterable[Any]:
        if self._are_alone:
            return self.objects.values()
        return chain.from_iterable(map(structure.held, self.objects.values()))

    def flatten(self) -> FlatState:
        """Tensors are references, not copies.

        Raises StateNotSavable with the name of the entry that needs pickle, or that has another
        shape than when the loop began.
        """
        tensors: dict[str, Tensor] = {}
        document, layers = {}, {}
        for name, thing in sorted(self.objects.items()):
            value = thing.state_dict()
            document[name] = encode_value(thing, value, name, tensors)
            if isinstance(thing, nn.Module):
                layers[name] = layer_versions(value)
        places = {name: place for name, tensor in tensors.items() if (place := alignment(tensor))}
        about: dict[str, Any] = {"layers": layers, "alignments": places}
        if self.sharded is not None:
            about["sharded"] = sorted(name for name, tensor in tensors.items() if is_sharded(tensor))
        if self._built is not None:
            built.check_shapes(self._shapes, self._shapes_of(tensors), self._modules)
            about |= {"built": self._built.to_json(), "now": built.structure_of(self.objects).to_json()}
        return FlatState(tensors=dict(sorted(tensors.items())), document=document, about=about)

    def _shapes_of(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        modules = self._modules
        return {name: tuple(each.shape) for name, each in tensors.items() if name.split(".")[0] in modules}

    def begin(self) -> None:
        """To be called before anything is restored. Raises StateNotSavable."""
        self._built = None
        self.check_savable()
        self._shapes = self._shapes_of(self.flatten().tensors)
        self._built = replace(built.structure_of(self.objects), settings=built.settings_of(self.objects))

    def check_savable(self) -> None:
        """Raises StateNotSavable with the name of an entry that cannot be kept."""
        layout(self.flatten().own().tensors, None)

    def checksum(self, flat: FlatState | None = None) -> Evidence:
        """That of the whole state; of a sharded one, by all ranks alike. Raises PeerLost.

        flat: the state as it is, for a caller that has it.
        """
        flat = flat or self.flatten()
        return checksum_of(flat) if self.sharded is None else checksum_of(flat, self.sharded.totals)

    def evidence(self, flat: FlatState | None = None) -> Evidence:
        """Likewise, with modes and settings: `state_evidence`."""
        flat = flat or self.flatten()
        return state_evidence(flat, self.checksum(flat))

    def load(self, flat: FlatState) -> Evidence:
        """Load every object, and make sure that each then has the state that was saved.

        Returns its evidence, since a second reading would cost as much as the load; of sharded
        tensors, that of this rank's rows. flat: sharded as the objects are.

        Each one's load_state_dict copies onto the object's own device. Raises StateDoesNotFit when
        the state is that of other objects, UsageError when an optimizer's parameters stand in
        another order than when it was saved, CheckpointDamaged when it is no state.
        """
        if flat.document.keys() != self.objects.keys():
            saved, ours = (", ".join(sorted(names)) for names in (flat.document, self.objects))
            raise StateDoesNotFit(f"it has the entries {saved}, and the recipe's State has {ours}")
        there = built.Structure.read(flat, "built") if "built" in flat.about else None
        if self._built is not None and there is not None:
            built.check_order(there.groups, self._built.groups, "when the state was saved")
        expected = load.contents(flat, checksum_of(flat), self.objects)
        for name, module in self._modules.items():
            load.load_module(name, module, flat)
        if self._built is not None and there is not None:
            built.take_structure(self.objects, self._built, there, built.Structure.read(flat, "now"))
            self.ignored = built.changes(there.settings, self._built.settings)
        of_modules = (load.own_tensors(name, module) for name, module in self._modules.items())
        live = {entry: each for tensors in of_modules for entry, each in tensors.items()}
        copies = load.SharedCopies(flat, live)
        for name, thing in self.objects.items():
            if not isinstance(thing, nn.Module):
                load.load_stateful(name, thing, flat, copies)
        loaded = self.flatten()
        checksum = checksum_of(loaded)
        if found := load.difference(expected, load.contents(loaded, checksum, self.objects)):
            raise StateDoesNotFit(
                f"load_state_dict does not bring it back; the first entry that differs is {found}"
            )
        return state_evidence(loaded, checksum)

    def load_as_built(self) -> Evidence:
        """Load what was built, as a process that resumes loads what was saved.

        Whatever a load changes (the parts of an object that it replaces, the order of a dict) is
        then changed in both. Returns the evidence. Raises UsageError for an object that a load
        leaves in another state.
        """
        flat = self.flatten()
        try:
            return self.load(flat)
        except (StateDoesNotFit, CheckpointDamaged, StateNotSavable) as error:
            raise UsageError(
                f"a trial load of what the State's objects give did not leave them as they were: {error}; "
                "let load_state_dict take what state_dict gave, and put all of it back"
            ) from error
