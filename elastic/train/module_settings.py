"""Numbers and words that the loop has set in modules of its State go on where they were.

A dropout rate that falls, a temperature, a phase: no state_dict has them, and a loop may set them
in some steps alone. So what the modules hold otherwise than the script built it stands beside each
saved state. A process that resumes puts it there before its first step.

What a forward changes (the length that its cache has reached) belongs to a process. So an attribute
is kept only where no method of its class assigns it that a forward may call, or where it was seen
to change while the loop's body ran, and never while a forward did. The others are named
(`unclear`). Modules that the
loop has put into the place of those that the script built are left alone: body_changes.py names
them. It does not keep objects, lists or tensors; torch's own parts of a module are saved elsewhere.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from operator import is_
from types import FunctionType
from typing import Any
from weakref import ReferenceType, ref

from torch import nn

from elastic.data.own_files import is_own_class
from elastic.errors import UsageError
from elastic.system.untrusted import parse_json
from elastic.train.dataset_settings import TEXT, is_kept
from elastic.train.own_code import attributes
from elastic.train.state import State

MANY = 1024  # names
PREFIX = "State."  # where those of the dataset have `dataset.`
_OF_TORCH = frozenset(vars(nn.Module()))
_ABSENT = object()


@dataclass(slots=True, kw_only=True)
class ModuleSettings:
    """Call `changed` where a state is saved.

    of_forward, of_body: names, such as `model.layers.0.p`, of what was seen to change while a
    forward ran, or the loop's body. BodyChanges adds to them.
    """

    state: State
    of_forward: set[str] = field(default_factory=set)
    of_body: set[str] = field(default_factory=set)
    # Modules, and classes of the recipe's that they have, by path, as the script had built them.
    _holders: dict[str, ReferenceType[Any]] = field(init=False)
    _built: dict[str, "_Built"] = field(init=False)
    _called: frozenset[str] = field(init=False)  # names of what forwards may call

    def __post_init__(self) -> None:
        found = dict(_holders(self.state))
        self._holders = {path: ref(thing) for path, thing in found.items()}
        self._built = {path: _Built.of(thing) for path, thing in found.items()}
        kinds = frozenset(thing if isinstance(thing, type) else type(thing) for thing in found.values())
        self._called = _called_by_forwards(kinds)

    def put_back(self, saved: Mapping[str, str], new_run: str) -> None:
        """saved: what `changed` gave. new_run: the command that begins one from the state.

        Raises UsageError for what has no place here.
        """
        for place, text in saved.items():
            name = place.removeprefix(PREFIX)
            path, _, attribute = name.rpartition(".")
            held, value = self._holders.get(path), _ABSENT
            holder = None if held is None else held()
            with suppress(ValueError):
                value = parse_json(text)
            if holder is None or not is_kept(value):
                raise UsageError(
                    f"the loop had set {name} to {text[:TEXT]} when the state was saved, and the modules that the script builds now have no place for"
                    f" it: build them as before, or begin a new run from this state: {new_run}"
                )
            self.of_body.add(name)
            if isinstance(holder, type):
                type.__setattr__(holder, attribute, value)
            else:
                vars(holder)[attribute] = value  # without the recipe's own code

    def changed(self) -> dict[str, str]:
        """What the loop has set: JSON by names like `State.model.layers.0.p`."""
        found = {name: value for name, value in self._differing() if self._is_the_loops(name)}
        return {PREFIX + name: json.dumps(value) for name, value in sorted(found.items())[:MANY]}

    def unclear(self, of_loop: Callable[[], frozenset[str]] = frozenset) -> list[str]:
        """The names of what a forward may have set, or the loop: a resume leaves it alone.

        of_loop: gives the attributes that code of the loop itself assigns. A forward that the body
        calls, as in an evaluation, sets in the body what it keeps for itself.
        """
        differing = list(self._differing())
        kept = [name for name, _ in differing if self._is_the_loops(name)]
        unclear = [name for name, _ in differing if name not in self.of_forward and name not in kept]
        if both := [name for name, _ in differing if name in self.of_forward & self.of_body]:
            assigned_there = of_loop()
            unclear += [name for name in both if name.rpartition(".")[2] in assigned_there]
        return unclear + sorted(kept)[MANY:]

    def _is_the_loops(self, name: str) -> bool:
        if name in self.of_forward or name in self.of_body:
            return name not in self.of_forward
        return not self.is_of_forward(name)

    def is_of_forward(self, name: str) -> bool:
        """Whether a forward may assign this attribute, by itself or by a method that it calls."""
        path, _, attribute = name.rpartition(".")
        held = self._holders.get(path)
        thing = None if held is None else held()
        return thing is None or attribute in assigned(
            thing if isinstance(thing, type) else type(thing), self._called
        )

    def _differing(self) -> Iterator[tuple[str, Any]]:
        """Numbers and words that are not what they were when the script had built all."""
        for path, built in self._built.items():
            thing = self._holders[path]()
            if thing is not None and not built.are_all(vars(thing)):
                for name, value in _plain(thing).items():
                    before = built.plain.get(name, _ABSENT)
                    if before is not value and repr(before) != repr(value):
                        yield f"{path}.{name}", value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """Numbers and words by name, the names of other attributes, and how many there are in all."""

    plain: dict[str, Any]
    others: list[str]
    size: int

    @classmethod
    def of(cls, thing: Any) -> "_Built":
        plain = _plain(thing)
        others = [name for name in vars(thing) if name not in plain and name not in _OF_TORCH]
        return cls(plain=plain, others=others, size=len(vars(thing)))

    def are_all(self, now: Mapping[str, Any]) -> bool:
        """Whether these are surely the numbers and words that there are now. It takes little."""
        is_same = len(now) == self.size and all(map(is_, map(now.get, self.plain), self.plain.values()))
        return is_same and not any(is_kept(now.get(name)) for name in self.others)


def _holders(state: State) -> Iterator[tuple[str, Any]]:
    for path, module in state.named_modules():
        yield path, module
        for kind in type(module).__mro__:
            if is_own_class(kind):
                yield f"class {kind.__module__}.{kind.__qualname__}", kind


def _plain(thing: Any) -> dict[str, Any]:
    is_class = isinstance(thing, type)
    return {
        name: value
        for name, value in vars(thing).items()
        if is_kept(value) and name not in _OF_TORCH and not (is_class and name.startswith("__"))
    }


@cache
def assigned(kind: type, called: frozenset[str] | None = None) -> frozenset[str]:
    """The attributes that a method of the class assigns, when it is no longer built.

    called: the names of the methods that count; None for all.
    """
    return frozenset().union(
        *(
            attributes(function.__code__)[1]
            for name, function in _methods(kind)
            if called is None or name in called
        )
    )


@cache
def _called_by_forwards(kinds: frozenset[type]) -> frozenset[str]:
    """The names of methods of any of the classes that a forward of any of them may call.

    A method counts by its name alone. Those with two underscores are called by Python.
    """
    methods = [each for kind in kinds for each in _methods(kind)]
    called = {"forward"} | {name for name, _ in methods if name.startswith("__")}
    size = 0
    while len(called) > size:
        size = len(called)
        for name, function in methods:
            if name in called:
                called |= attributes(function.__code__)[0]
    return frozenset(called)


def _methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for each in kind.__mro__:
        if each not in (nn.Module, object):
            for name, made in vars(each).items():
                parts = (made.fget, made.fset) if isinstance(made, property) else (made,)
                for function in parts:
                    if isinstance(function, FunctionType) and name != "__init__":
                        yield name, function
