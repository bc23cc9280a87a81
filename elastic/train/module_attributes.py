"""The attributes of modules are read often, and take time only where one is not what it was.

A model of 150 modules has some four thousand attributes, and almost all of them stay what they are
for a whole run. So a reading first compares all of them by identity, those that have a version also
by that; the modules where one differs are then read anew. What counts as a change is decided by
stale_copies.py.

Torch's own parts of a module (parameters, buffers, submodules, its mode) do not count, but for its
hooks. A module that takes the place of another one does.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from elastic.data import stale_copies
from elastic.data.stale_copies import Attribute, Attributes
from elastic.train import structure
from elastic.train.structure import Items

_OF_MODULES = frozenset(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks"}


@dataclass(slots=True, kw_only=True)
class _Reading:
    """All attributes of a module, torch's own parts too, and those that count, by path."""

    path: str
    module: nn.Module
    names: list[str]
    values: list[Any]
    attributes: Attributes

    def is_current(self) -> bool:
        held = vars(self.module)
        if list(held) != self.names or not structure.same(list(held.values()), self.values):
            return False
        return all(stale_copies.version_of(each.value) == each.version for each in self.attributes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Together:
    """What decides whether anything has changed, of all readings."""

    children: Items
    attributes: Items
    sized: list[Any]  # values that have a length
    sizes: list[int]
    tensors: list[Tensor]
    versions: list[int]

    def is_current(self, dicts: list[dict[str, Any]]) -> bool:
        return (
            self.attributes.are(Items.of(dicts))
            and list(map(len, self.sized)) == self.sizes
            and list(map(stale_copies.version_of, self.tensors)) == self.versions
        )


class ModuleAttributes:
    """now: what the last reading found, by path, such as `model.layers.0.p`."""

    def __init__(self) -> None:
        self.now: Attributes = {}
        self._roots: dict[str, nn.Module] = {}
        self._readings: list[_Reading] = []
        self._together = _together([])

    def read(self, roots: dict[str, nn.Module]) -> list[str]:
        """The names of what is not as the last reading found it. roots: by their path."""
        is_same = list(roots) == list(self._roots) and structure.same(
            list(roots.values()), list(self._roots.values())
        )
        if not (is_same and self._has_same_modules()):
            return self._read_all(roots)
        if self._together.is_current([vars(reading.module) for reading in self._readings]):
            return []
        names = []
        for index, reading in enumerate(self._readings):
            if not reading.is_current():
                new = self._readings[index] = _read(reading.path, reading.module)
                names += stale_copies.changed(reading.attributes, new.attributes)
                for name in reading.attributes:
                    self.now.pop(name, None)
                self.now |= new.attributes
        self._together = _together(self._readings)
        return names

    def _has_same_modules(self) -> bool:
        now = [_children_of(reading.module) for reading in self._readings]
        return self._together.children.are(Items.of(now))

    def _read_all(self, roots: dict[str, nn.Module]) -> list[str]:
        self._roots = roots
        self._readings = [
            _read(path, module)
            for entry, root in roots.items()
            for path, module in root.named_modules(prefix=entry)
        ]
        self._together = _together(self._readings)
        before = self.now
        self.now = {name: each for reading in self._readings for name, each in reading.attributes.items()}
        return stale_copies.changed(before, self.now)


def _read(path: str, module: nn.Module) -> _Reading:
    held = dict(vars(module))
    attributes = {path: Attribute(module, 0)}
    for name, value in held.items():
        if name not in _OF_MODULES:
            attributes[f"{path}.{name}"] = Attribute(value, stale_copies.version_of(value))
    return _Reading(
        path=path, module=module, names=list(held), values=list(held.values()), attributes=attributes
    )


def _together(readings: list[_Reading]) -> _Together:
    attributes = [each for reading in readings for each in reading.attributes.values()]
    sized = [each for each in attributes if isinstance(each.value, stale_copies.CONTAINERS)]
    tensors = [each for each in attributes if isinstance(each.value, Tensor)]
    return _Together(
        children=Items.of([_children_of(reading.module) for reading in readings]),
        attributes=Items.of([dict(zip(r.names, r.values, strict=True)) for r in readings]),
        sized=[each.value for each in sized],
        sizes=[each.version for each in sized],
        tensors=[each.value for each in tensors],
        versions=[each.version for each in tensors],
    )


def _children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules  # noqa: SLF001 - as nn.Module's own methods walk
