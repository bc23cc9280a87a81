"""The attributes of modules are read often, and take time only where one is not what it was.

A model of 150 modules has some four thousand attributes, and almost all of them stay what they are
for a whole run. So a reading first compares all of them by identity, those that have a version also
by that; the modules where one differs are then read again. stale_copies.py decides what counts as
a change.

No reading keeps alive what a forward leaves in an attribute, and with it the graph of a step.

Torch's own parts of a module (parameters, buffers, submodules, its mode) do not count, but for its
hooks and the order of their names, in which a container's forward goes. A module that takes the
place of another one does, and its class.
"""

from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any
from weakref import ref

from torch import nn

from elastic.data import stale_copies
from elastic.data.stale_copies import Attribute, Attributes
from elastic.train import structure
from elastic.train.structure import Items

CLASS = "__class__"
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})
_KINDS = "_modules", "_parameters", "_buffers"
_PARTS = tuple(map(itemgetter, _KINDS))
_ITSELF = bool, int, float, str, nn.Module
_PLAIN = frozenset({bool, int, float, str, type(None)})
_OF_TORCH = frozenset(vars(nn.Module()))
_OF_MODULES = _OF_TORCH - _HOOKS


class Address(int):
    """Of a list, a tuple or a dict, which may hold outputs and cannot be referred to weakly."""


def standing_for(value: Any) -> Any:
    """The value itself if it is a number, a word, a tuple of those, a function or a module; else
    its identity.
    """
    if value is None or isinstance(value, _ITSELF) or callable(value):
        return value
    if type(value) is tuple and all(type(each) in _PLAIN for each in value):
        return value
    try:
        return ref(value)  # the same object at each call, as long as one is kept
    except TypeError:
        return Address(id(value)) if isinstance(value, (list, tuple, dict)) else value


@dataclass(slots=True, kw_only=True)
class _Reading:
    """Those attributes of a module that count, by path, as they stood among all of them."""

    path: str
    module: nn.Module
    all: "_All"
    attributes: Attributes

    def is_current(self) -> bool:
        return self.all.are([self.module])


@dataclass(frozen=True, slots=True, kw_only=True)
class _All:
    """All attributes of some modules, and their classes.

    hooks: dicts of them, with their sizes. others: by place, what stands for values that are not
    kept, and their versions.
    """

    kinds: list[type]
    kept: Items
    hooks: list[Any]
    sizes: list[int]
    others: list[tuple[int, Any, int]]

    @classmethod
    def of(cls, modules: list[nn.Module]) -> "_All":
        items, others = Items.of(list(map(vars, modules))), []
        for place in [place for place, name in enumerate(items.names) if name not in _OF_TORCH]:
            value = items.values[place]
            standing = standing_for(value)
            if standing is not value:
                others.append((place, standing, stale_copies.version_of(value)))
                items.values[place] = None
        hooks = [value for name, value in zip(items.names, items.values, strict=True) if name in _HOOKS]
        return cls(
            kinds=list(map(type, modules)),
            kept=items,
            hooks=hooks,
            sizes=list(map(len, hooks)),
            others=others,
        )

    def are(self, modules: list[nn.Module]) -> bool:
        if not structure.same(list(map(type, modules)), self.kinds):
            return False
        now = Items.of(list(map(vars, modules)))
        if now[:2] != self.kept[:2] or list(map(len, self.hooks)) != self.sizes:
            return False
        for place, standing, version in self.others:
            value = now.values[place]
            found = standing_for(value)
            if found is not standing and not (isinstance(found, Address) and found == standing):
                return False
            if stale_copies.version_of(value) != version:
                return False
            now.values[place] = None
        return structure.same(now.values, self.kept.values)


class ModuleAttributes:
    """now: what the last reading found, by path, such as `model.layers.0.p`."""

    def __init__(self) -> None:
        self.now: Attributes = {}
        # By path and kind: names of parts, each with its place, in the order in which they came.
        self._places: dict[tuple[str, str], dict[str, int]] = {}
        self._names: list[str] = []  # of all parts, one module's after another's
        self._roots: dict[str, nn.Module] = {}
        self._readings: list[_Reading] = []
        self._children = Items.of([])
        self._all = _All.of([])

    def read(self, roots: dict[str, nn.Module]) -> list[str]:
        """The names of what is not as the last reading found it. roots: by their path."""
        is_same = list(roots) == list(self._roots) and structure.same(
            list(roots.values()), list(self._roots.values())
        )
        if not (is_same and self._has_same_modules()):
            return self._read_all(roots)
        modules = [reading.module for reading in self._readings]
        names = [] if self._part_names() == self._names else self._reordered()
        if self._all.are(modules):
            return names
        for index, reading in enumerate(self._readings):
            if not reading.is_current():
                new = self._readings[index] = _read(reading.path, reading.module)
                names += stale_copies.changed(reading.attributes, new.attributes)
                for name in reading.attributes:
                    self.now.pop(name, None)
                self.now |= new.attributes
        self._all = _All.of(modules)
        return names

    def _has_same_modules(self) -> bool:
        return self._children.are(Items.of([_children_of(reading.module) for reading in self._readings]))

    def _read_all(self, roots: dict[str, nn.Module]) -> list[str]:
        self._roots = roots
        self._readings = [
            _read(path, module)
            for entry, root in roots.items()
            for path, module in root.named_modules(prefix=entry)
        ]
        self._children = Items.of([_children_of(reading.module) for reading in self._readings])
        self._all = _All.of([reading.module for reading in self._readings])
        before = self.now
        self.now = {name: each for reading in self._readings for name, each in reading.attributes.items()}
        return stale_copies.changed(before, self.now) + self._reordered()

    def _part_names(self) -> list[str]:
        attributes = [reading.module.__dict__ for reading in self._readings]
        return [name for parts in _PARTS for name in chain.from_iterable(map(parts, attributes))]

    def _reordered(self) -> list[str]:
        """Where parts of a module no longer stand in the order in which they came."""
        self._names, found = self._part_names(), []
        for reading in self._readings:
            for kind, parts in zip(_KINDS, _PARTS, strict=True):
                known = self._places.setdefault((reading.path, kind), {})
                places = [known.setdefault(name, len(known)) for name in parts(vars(reading.module))]
                if places != sorted(places):
                    found.append(f"{reading.path}.{kind} (their order)")
        return found


def _read(path: str, module: nn.Module) -> _Reading:
    attributes = {path: Attribute(module, 0), f"{path}.{CLASS}": Attribute(type(module), 0)}
    for name, value in vars(module).items():
        if name not in _OF_MODULES:
            attributes[f"{path}.{name}"] = Attribute(standing_for(value), stale_copies.version_of(value))
    return _Reading(path=path, module=module, all=_All.of([module]), attributes=attributes)


def _children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules  # noqa: SLF001 - as nn.Module's own methods walk
