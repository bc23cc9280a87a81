"""What a recipe builds is compared with what it built when the state was saved.

Three things decide what a state means, and are no part of it. An optimizer's state belongs to
parameters by their places in its groups: in another order it would be taken for that of other
parameters of the same shape. The settings that objects were built with are those that were saved,
whatever the recipe says now. Which parameters are frozen is an attribute of theirs.

A module whose tensors the loop adds, removes or reshapes could not be loaded into what a resume
builds, and is refused. It does not tell parameters apart that no module of the State has.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from elastic.errors import CheckpointDamaged, StateNotSavable, UsageError
from elastic.snapshot.sharded import is_sharded
from elastic.system.untrusted import decode
from elastic.train.state import structure
from elastic.train.state.flat import WITH_SETTINGS, FlatState

_SHORT = 32  # elements of a tensor or list that is a setting
_NO_SETTINGS = {"params", "param_names", "state"}

Objects = Mapping[str, Any]
Groups = dict[str, list[list[str]]]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """groups: by optimizer, the names of the parameters of each of its groups, in order. frozen:
    the names of parameters that require no gradient. evaluating: those of modules that are not in
    training mode. settings: as text, by place; of what was built alone.
    """

    groups: Groups = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    evaluating: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Without copies, which would cost half a millisecond in each snapshot."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @staticmethod
    def read(flat: FlatState, key: str) -> "Structure":
        """Raises CheckpointDamaged."""
        try:
            return decode(Structure, flat.about[key], what=f"the structure {key!r} of a state")
        except ValueError as error:
            raise CheckpointDamaged(str(error)) from error


def structure_of(objects: Objects) -> Structure:
    """As it is now."""
    named = list(_named(objects))
    names = {id(parameter): name for parameter, name in named}
    return Structure(
        groups={name: _groups(each, names) for name, each in _parts(objects, Optimizer)},
        frozen=[name for parameter, name in named if not parameter.requires_grad],
        evaluating=[name for module, name in _named_modules(objects) if not module.training],
    )


def settings_of(objects: Objects) -> dict[str, str]:
    """To be called before anything is restored."""
    parts = _parts(objects, WITH_SETTINGS)
    return {place: text for name, part in parts for place, text in settings_in(part.state_dict(), name)}


def check_order(saved: Groups, built: Groups, when: str) -> None:
    """Raises UsageError with the first two parameters that stand in another order."""
    for name, groups in built.items():
        for before, now in zip_longest(_places(saved.get(name, groups)), _places(groups)):
            if before != now:
                raise UsageError(
                    f"{name}.param_groups: expected {before or 'no parameter more'}, as {when}, found {now or 'none'}; its state belongs to places: "
                    "build its groups from lists, never from a set"
                )


def _places(groups: list[list[str]]) -> list[str]:
    return [f"{each} in group {number}" for number, group in enumerate(groups) for each in group]


def changes(saved: dict[str, str], built: dict[str, str]) -> list[str]:
    """The settings that differ, each with both values."""
    both = [name for name in saved if name in built]
    return [f"{name} {saved[name]}, not {built[name]}" for name in both if saved[name] != built[name]]


def take_structure(objects: Objects, built: Structure, there: Structure, now: Structure) -> None:
    """What the recipe's loop had made of what it built `there`: groups, frozen parameters, modes.

    Where the recipe was edited, and builds others, it means them.
    """
    tensors = {name: tensor for tensor, name in _named(objects)}
    frozen, evaluating = set(now.frozen), set(now.evaluating)
    for name, each in _parts(objects, Optimizer):
        groups, had = now.groups.get(name, []), len(built.groups[name])
        for group in groups[had:] if groups[:had] == built.groups[name] else ():
            if all(parameter in tensors for parameter in group):
                each.add_param_group({"params": [tensors[parameter] for parameter in group]})
    if there.frozen == built.frozen:
        for name, parameter in tensors.items():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(not parameter.requires_grad)
    if there.evaluating == built.evaluating:
        for module, name in _named_modules(objects):
            module.training = name not in evaluating


def check_shapes(built: Shapes, now: Shapes, modules: Mapping[str, nn.Module]) -> None:
    """Compare the shapes of modules' entries, when the loop began and since. Raises
    StateNotSavable.

    Where a class has a load of its own, it may build missing parts first.
    """
    if built == now:
        return
    for entry in sorted(built.keys() | now.keys()):
        before, found = built.get(entry, "no tensor"), now.get(entry, "no tensor")
        if before != found and not _has_own_load(modules[entry.split(".")[0]]):
            raise StateNotSavable(
                f"state entry {entry}: expected the shape {before}, as when the loop began, found {found}; build the model in its "
                "final shape, with parts frozen or masked, or give it a load_state_dict that builds the saved parts"
            )


def _has_own_load(model: nn.Module) -> bool:
    loads = [type(model).load_state_dict, *(type(m)._load_from_state_dict for m in model.modules())]  # noqa: SLF001
    return not all(each.__module__.startswith("torch.nn.") for each in loads)


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
        for path, parameter in module.named_parameters(prefix=name):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, path


def _named_modules(objects: Objects) -> Iterator[tuple[nn.Module, str]]:
    for name, module in _parts(objects, nn.Module):
        yield from ((each, path) for path, each in module.named_modules(prefix=name))


def _groups(optimizer: Optimizer, names: dict[int, str]) -> list[list[str]]:
    found = []
    for group in optimizer.param_groups:
        given = group.get("param_names") or [f"a parameter of shape {list(p.shape)}" for p in group["params"]]
        found.append([names.get(id(p), its) for p, its in zip(group["params"], given, strict=True)])
    return found


def settings_in(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """(place, text) of numbers, words and short lists of them; what begins with _ is no setting."""
    if isinstance(value, Tensor):
        if value.numel() <= _SHORT and value.device.type != "meta" and not is_sharded(value):
            yield place, repr(value.tolist())
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _NO_SETTINGS and not str(key).startswith("_"):
                yield from settings_in(item, f"{place}.{key}")
    elif isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from settings_in(item, f"{place}[{number}]")
    elif isinstance(value, list | tuple):
        if len(value) <= _SHORT and not any(isinstance(item, Tensor) for item in value):
            yield place, repr(value)
    elif isinstance(value, bool | int | float | str | None):
        yield place, repr(value)
