"""What a recipe builds is compared with what it built when the state was saved, and between ranks.

Three things decide what a state means, and are no part of it. An optimizer's state belongs to
parameters by their places in its groups: in another order it would be taken for that of other
parameters of the same shape. The settings that objects were built with are those that were saved,
whatever the recipe says now. Which parameters are frozen is an attribute of theirs.

It does not tell parameters apart that no module of the State has.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic.errors import UsageError
from elastic.train.state import structure
from elastic.train.state.values import Values

# Objects that save their settings, and give them back in place of those that they were built with.
# Their dicts are read by name: parameters, attributes, settings.
WITH_SETTINGS = (Optimizer, LRScheduler, torch.amp.GradScaler, Values)
_SHORT = 32  # elements of a tensor or list that is a setting
_NO_SETTINGS = {"params", "param_names", "state"}

Objects = Mapping[str, Any]
Groups = dict[str, list[list[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """groups: by optimizer, the names of the parameters of each of its groups, in order. frozen:
    the names of parameters that require no gradient. evaluating: those of modules that are not in
    training mode.
    """

    groups: Groups = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    evaluating: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Without copies, which would cost half a millisecond in each snapshot."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Built(Structure):
    """What a recipe built before the loop. settings: as text, by place."""

    settings: dict[str, str] = field(default_factory=dict)


class StructureReader:
    """The structure of some objects as it is now. It is read at every snapshot."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._seen: list[nn.Parameter] = []
        self._groups: Groups = {}

    def read(self) -> Structure:
        optimizers = list(_parts(self._objects, Optimizer))
        grouped = [p for _, each in optimizers for group in each.param_groups for p in group["params"]]
        modules = structure.submodules(part for _, part in _parts(self._objects, nn.Module))
        parameters = structure.parameters(modules).values()
        frozen = [p for p in parameters if not p.requires_grad]
        # To find all names takes ten times as long as all the rest.
        names = _names(self._objects) if frozen or not _are_the_same(grouped, self._seen) else {}
        if names:
            self._groups = {name: _groups(each, names) for name, each in optimizers}
            self._seen = grouped
        evaluating = list[str]()
        if not all(module.training for module in modules):
            evaluating = [name for module, name in _named_modules(self._objects) if not module.training]
        return Structure(groups=self._groups, frozen=[names[id(p)] for p in frozen], evaluating=evaluating)


def as_built(objects: Objects) -> Built:
    """To be called before anything is restored."""
    now, settings = StructureReader(objects).read(), dict[str, str]()
    for name, part in _parts(objects, WITH_SETTINGS):
        _add_settings(part.state_dict(), name, settings)
    return Built(groups=now.groups, frozen=now.frozen, evaluating=now.evaluating, settings=settings)


def check_order(saved: Groups, built: Groups, when: str) -> None:
    """Raises UsageError with the first two parameters that stand in another order."""
    for name, groups in built.items():
        before = saved.get(name)
        if before is None or before == groups:
            continue
        sizes, now = [len(group) for group in before], [len(group) for group in groups]
        if sizes != now:
            raise UsageError(f"{name} has groups of {now} parameters, and had groups of {sizes} {when}")
        places = [(number, place) for number, group in enumerate(groups) for place in range(len(group))]
        differing = [(n, p) for n, p in places if before[n][p] != groups[n][p]]
        number, place = differing[0]
        raise UsageError(
            f"{name}.param_groups[{number}] has {groups[number][place]} in place {place}, where {before[number][place]} was {when}; "
            "its state belongs to places: build its groups from lists, never from a set"
        )


def check_alike(of_ranks: list[Built]) -> None:
    """Raises UsageError unless all ranks have built the same."""
    first = of_ranks[0]
    for rank, each in enumerate(of_ranks):
        check_order(first.groups, each.groups, f"on rank 0 (this is rank {rank})")
        if frozen := sorted(set(first.frozen) ^ set(each.frozen)):
            raise UsageError(f"{frozen[0]} is frozen on one of the ranks 0 and {rank} and not on the other")
        if evaluating := sorted(set(first.evaluating) ^ set(each.evaluating)):
            raise UsageError(
                f"{evaluating[0]} is in training mode on one of the ranks 0 and {rank} and not on the other"
            )
        if changed := changes(first.settings, each.settings):
            raise UsageError(f"rank {rank} builds other settings than rank 0: {changed[0]}")


def changes(saved: dict[str, str], built: dict[str, str]) -> list[str]:
    """The settings that differ, each with both values."""
    both = [name for name in saved if name in built]
    return [f"{name} {saved[name]}, not {built[name]}" for name in both if saved[name] != built[name]]


def add_groups(objects: Objects, built: Groups, saved: Groups) -> None:
    """Give optimizers the groups that the recipe added in its loop, whose state is to be loaded."""
    tensors = {name: tensor for tensor, name in _named(objects)}
    for name, each in _parts(objects, Optimizer):
        groups, had = saved.get(name, []), len(built[name])
        if groups[:had] != built[name]:
            continue
        for group in groups[had:]:
            if all(parameter in tensors for parameter in group):
                each.add_param_group({"params": [tensors[parameter] for parameter in group]})
                vars(each)["add_param_group"] = partial(_add_group, name, each, tensors)


def _add_group(name: str, optimizer: Optimizer, tensors: Mapping[str, Tensor], group: dict[str, Any]) -> None:
    """The method of an optimizer that has got groups of the loop back."""
    given = group["params"] if isinstance(group["params"], list | tuple) else [group["params"]]
    present = {id(p) for each in optimizer.param_groups for p in each["params"]}
    for path, tensor in tensors.items():
        if id(tensor) in present and any(p is tensor for p in given):
            raise UsageError(
                f"{name}.add_param_group: {path} is in a group already. This process resumed after the step in which the loop had added it, "
                "and has the group again; a variable of the script, as in `if not unfrozen:`, is as at the start. Decide by the step, "
                "`if step.number == 4:`, or by what is there, `if len(optimizer.param_groups) == 1:`"
            )
    type(optimizer).add_param_group(optimizer, group)


def freeze(objects: Objects, frozen: list[str]) -> None:
    """Make these parameters require no gradient, and all others require one."""
    names = set(frozen)
    for parameter, name in _named(objects):
        if parameter.requires_grad == (name in names):
            parameter.requires_grad_(name not in names)


def set_modes(objects: Objects, evaluating: list[str]) -> None:
    """Put these modules into evaluation mode, and all others into training mode."""
    names = set(evaluating)
    for module, name in _named_modules(objects):
        module.training = name not in names


def _parts(objects: Objects, kind: Any) -> Iterator[tuple[str, Any]]:
    """Each object of a kind with its name; several that another object holds are numbered."""
    for name, thing in sorted(objects.items()):
        found = [part for part in structure.held(thing) if isinstance(part, kind)]
        for number, part in enumerate(found):
            yield (name if len(found) == 1 else f"{name}.{number}"), part


def _named(objects: Objects) -> Iterator[tuple[nn.Parameter, str]]:
    """Each parameter of the modules under one name, a tied one under its first."""
    seen: set[int] = set()
    for name, module in _parts(objects, nn.Module):
        for path, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, f"{name}.{path}"


def _named_modules(objects: Objects) -> Iterator[tuple[nn.Module, str]]:
    for name, module in _parts(objects, nn.Module):
        yield from ((each, path) for path, each in module.named_modules(prefix=name))


def _names(objects: Objects) -> dict[int, str]:
    return {id(parameter): name for parameter, name in _named(objects)}


def _groups(optimizer: Optimizer, names: dict[int, str]) -> list[list[str]]:
    found = []
    for group in optimizer.param_groups:
        given = group.get("param_names") or [f"a parameter of shape {list(p.shape)}" for p in group["params"]]
        found.append([names.get(id(p), its) for p, its in zip(group["params"], given, strict=True)])
    return found


def _are_the_same(some: list[nn.Parameter], others: list[nn.Parameter]) -> bool:
    return len(some) == len(others) and all(map(lambda one, other: one is other, some, others))


def _add_settings(value: Any, place: str, found: dict[str, str]) -> None:
    """Numbers, words and short lists of them; what begins with _ is no setting."""
    if isinstance(value, Tensor):
        if value.numel() <= _SHORT and value.device.type != "meta":
            found[place] = repr(value.tolist())
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _NO_SETTINGS and not str(key).startswith("_"):
                _add_settings(item, f"{place}.{key}", found)
    elif isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            _add_settings(item, f"{place}[{number}]", found)
    elif isinstance(value, list | tuple):
        if len(value) <= _SHORT and not any(isinstance(item, Tensor) for item in value):
            found[place] = repr(value)
    elif isinstance(value, bool | int | float | str | None):
        found[place] = repr(value)
