"""Numbers and words that the loop has set in its dataset, or in collate, go on where they were.

A loop may set them in some steps alone, as where an epoch begins, and no state_dict has them. So
what the dataset holds otherwise than the script built it stands beside each saved state. A process
that resumes puts it there before its first step, which is what the undisturbed process has there.

What loading changes (a counter, the number of an open file) belongs to a process, and is left as it
is: attributes are read before and after the samples of each step are loaded. A number that loading
changes after the first step is named, since a sample may depend on it. It does not keep objects,
nor what lies inside them (body_changes.py names or refuses those).
"""

import json
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from elastic.data import stale_copies
from elastic.data.attributes import has_space, space_of
from elastic.data.stale_copies import Attributes
from elastic.errors import UsageError
from elastic.system.untrusted import parse_json
from elastic.train import structure

MANY = 64  # names
TEXT = 200  # characters of a value
_CLASS = ".__class__"
_PLAIN = bool, int, float, str, type(None)
_NUMBERS = int, float


@dataclass(slots=True, kw_only=True)
class DatasetSettings:
    """Call `before_loading` and `after_loading` in each step, `changed` where a state is saved.

    of_loading: names of what loading changed, in place as well. counted: of numbers that it changed
    after the first step of this process.
    """

    dataset: Any
    collate: Any = None
    _built: Attributes = field(init=False)
    _before: Attributes = field(init=False)
    _own: dict[str, Any] = field(init=False)  # by the names of what no class of theirs has, the objects
    of_loading: set[str] = field(default_factory=set)
    counted: set[str] = field(default_factory=set)
    _has_loaded: bool = False
    # The last reading, the dicts of all objects that it met, and their values.
    _last: Attributes = field(default_factory=dict)
    _spaces: list[Mapping[str, Any]] = field(default_factory=list)
    _values: list[list[Any]] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)  # of what has some

    def __post_init__(self) -> None:
        self._built = self._before = self._read()
        held = _held(self._roots, self._built)
        holders = ((name, held[_holder(name)]) for name, each in self._built.items() if is_kept(each.value))
        self._own = {name: each for name, each in holders if name.rpartition(".")[2] in space_of(each)}

    def put_back(self, saved: Mapping[str, str], new_run: str) -> None:
        """saved: what `changed` gave. new_run: the command that begins one from the state.

        Raises UsageError for an attribute that has no place here.
        """
        for place, text in saved.items():
            path, _, name = place.rpartition(".")
            path, of_class, depth = path.partition(_CLASS)
            holder, value = _held(self._roots, self._read()).get(path), None
            kinds = type(holder).__mro__
            number = 0 if not depth else int(depth) if depth.isdecimal() and len(depth) == 1 else len(kinds)
            with suppress(ValueError):
                value = parse_json(text)
            has_place = has_space(holder) and number < len(kinds) - 1
            if not has_place or type(value) not in _PLAIN:
                raise UsageError(
                    f"the loop had set {place} to {text[:TEXT]} when the state was saved, and what the script gives to run.data now has no such"
                    f" attribute: build it as before, or begin a new run from this state: {new_run}"
                )
            if of_class:
                type.__setattr__(kinds[number], name, value)
            else:
                space_of(holder)[name] = value  # without the recipe's own code

    def before_loading(self) -> None:
        self._before = self._read()

    def after_loading(self) -> None:
        now = self._read()
        if now is not self._before:
            names = stale_copies.changed(self._before, now)
            self.of_loading.update(names)
            if self._has_loaded:  # what the first samples set may be a constant
                self.counted.update(
                    each for each in names if each in now and type(now[each].value) in _NUMBERS
                )
        self._has_loaded = True

    def changed(self) -> dict[str, str]:
        """What the loop has set: JSON by names like `dataset.strength`."""
        now = self._read()
        names = [
            name
            for name in stale_copies.changed(self._built, now)
            if name in now and name not in self.of_loading and is_kept(now[name].value)
        ]
        if now is not self._built:
            self._check_removed(now)
        held = _held(self._roots, now) if names else {}
        return {_place(name, held): json.dumps(now[name].value) for name in sorted(names)[:MANY]}

    def _check_removed(self, now: Attributes) -> None:
        """Raises UsageError for a number or a word that an object had and has no longer."""
        held = _held(self._roots, now)
        for name, holder in self._own.items():
            is_there = name in self.of_loading or held.get(_holder(name)) is not holder
            if not is_there and name.rpartition(".")[2] not in space_of(holder):
                raise UsageError(
                    f"the loop removed {name}, and a process that restarts builds it again: set it to another value in place of `del`, as None; the numbers, words and None that"
                    " the loop sets in what run.data was given are saved with each state"
                )

    def built(self, names: Container[str]) -> dict[str, Any]:
        """The attributes of these names, as the script made them."""
        return {path: each.value for path, each in self._built.items() if path.rpartition(".")[2] in names}

    def values(self) -> dict[str, Any]:
        """What the attributes are now, by name."""
        return {name: each.value for name, each in self._read().items()}

    def holders(self) -> list[Any]:
        """The objects whose numbers and words are kept: the dataset, and what is asked below it."""
        now = self._read()
        held = _held(self._roots, now)
        return [held[path] for path in dict.fromkeys([*self._roots, *(_holder(name) for name in now)])]

    @property
    def _roots(self) -> dict[str, Any]:
        return stale_copies.roots_of(self.dataset, self.collate)

    def _read(self) -> Attributes:
        """The last reading where all attributes are what they were, which costs little."""
        is_same = self._spaces and all(map(structure.same, map(_values, self._spaces), self._values))
        if is_same and _versions(self._last) == self._versions:
            return self._last
        now = self._last = stale_copies.attributes_of(self.dataset, self.collate)
        held = _held(self._roots, now)
        holders = [held[path] for path in dict.fromkeys(map(_holder, now))]
        self._spaces = [
            space for each in holders for space in (space_of(each), *map(vars, type(each).__mro__[:-1]))
        ]
        self._values = [_values(each) for each in self._spaces]
        self._versions = _versions(now)
        return now


def is_kept(value: Any) -> bool:
    """Whether an attribute of the dataset with this value comes back at a resume."""
    return type(value) in _PLAIN and (type(value) is not str or len(value) <= TEXT)


def _values(space: Mapping[str, Any]) -> list[Any]:
    return list(space.values())


def _versions(attributes: Attributes) -> list[int]:
    """As they are now, of the values that the attributes had."""
    return [
        stale_copies.version_of(each.value) for each in attributes.values() if type(each.value) not in _PLAIN
    ]


def _held(roots: Mapping[str, Any], attributes: Attributes) -> dict[str, Any]:
    """The dataset and collate, what their attributes are, and what lists there hold, by name."""
    found = dict(roots)
    for name, attribute in attributes.items():
        found[name] = attribute.value
        if isinstance(attribute.value, list | tuple):
            found |= {f"{name}[{number}]": each for number, each in enumerate(attribute.value)}
    return found


def _holder(name: str) -> str:
    return name.rpartition(".")[0]


def _place(name: str, held: Mapping[str, Any]) -> str:
    """The name, and which class has it, for all its objects; `__class__1` is the first base."""
    path, _, attribute = name.rpartition(".")
    if attribute in space_of(held[path]):
        return name
    number = next(n for n, kind in enumerate(type(held[path]).__mro__) if attribute in vars(kind))
    return f"{path}{_CLASS}{number or ''}.{attribute}"
