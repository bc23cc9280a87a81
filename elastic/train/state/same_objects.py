"""After a load, names that a recipe holds for parts of an object still belong to that object.

`load_state_dict` of torch's optimizers and schedules, and of many objects of recipes, puts new
dicts, lists and tensors in the place of those that the object had. A name that was taken before
(`group = optimizer.param_groups[0]`) would then belong to a part that nothing reads any more, and
what the loop sets through it would have an effect in a calm run and none after a restart. So the
parts are noted before the load, and afterwards they get the contents of those that took their
places.

Parts are dicts, lists, tuples, deques, sets and tensors, and what further objects hold in their
attributes, two levels deep. NumPy's arrays, generators of random numbers and objects of other
classes that a load replaces are not kept: `left_behind` finds those that something still holds. A
module is left alone: it loads into its own tensors.
"""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from elastic.train.state.structure import DEPTH

_DICTS = dict, OrderedDict, Counter, defaultdict
_LISTS = list, deque
_CONTAINERS = frozenset({*_DICTS, *_LISTS, set, tuple})
_NOT_LOOKED_INTO = nn.Module, Tensor, type, ModuleType, FunctionType, MethodType
_NOT_KEPT = np.ndarray, np.random.Generator, random.Random, Generator, *_DICTS, *_LISTS, set
_ABSENT = object()


class SameObjects:
    """The parts that an object has now. Call `put_back` after its load.

    untouchable: ids of the tensors of modules, which are not those of the object that is loaded.
    """

    def __init__(self, thing: Any, untouchable: frozenset[int]) -> None:
        self._thing = thing
        self._untouchable = untouchable
        self._noted: dict[int, tuple[Any, Any]] = {}  # by id: (part, what it held)
        self._others: dict[str, Any] = {}  # by path: parts that are not kept
        self._groups: set[int] = set()  # ids of the groups of optimizers
        self._filled: set[int] = set()  # ids of parts that have new contents
        self._placed: dict[int, tuple[Any, Any]] = {}  # by id: (loaded part, the one in its place)
        self._note(thing, DEPTH, "")

    def put_back(self) -> None:
        self._fit(self._thing, self._thing)

    def left_behind(self) -> list[str]:
        """Paths of parts that the load has replaced and that are held elsewhere. Call it last."""
        others = self._others
        self._others = {}
        self._noted.clear()
        self._placed.clear()
        self._note(self._thing, DEPTH, "")
        present = {id(part) for part in self._others.values()}
        alone = {"": np.empty(0)}  # how many references a part has that nothing else holds
        return [
            path
            for path in others
            if _holds(others, path) > _holds(alone, "") and id(others[path]) not in present
        ]

    def _note(self, part: Any, depth: int, path: str) -> None:
        if isinstance(part, Tensor):
            self._noted[id(part)] = part, ()
        if isinstance(part, _NOT_KEPT) and type(part) not in _CONTAINERS:
            self._others[path] = part
        if id(part) in self._noted or isinstance(part, _NOT_LOOKED_INTO):
            return
        held = _contents(part)
        if held is None and depth > 0 and hasattr(part, "__dict__"):
            held, depth = dict(vars(part)), depth - 1
        if held is None:
            return
        self._noted[id(part)] = part, held
        if isinstance(part, Optimizer):
            self._groups |= {id(group) for group in part.param_groups}
        for name, each in held.items() if isinstance(held, dict) else enumerate(held):
            self._note(each, depth, f"{path}.{name}")

    def _fit(self, old: Any, new: Any) -> Any:
        """What belongs in the place of `new`, which the load has put where `old` was."""
        if id(new) in self._placed:
            return self._placed[id(new)][1]
        is_moved = new is not old and id(new) in self._noted  # on purpose
        if is_moved or id(old) not in self._noted or id(old) in self._filled:
            return new
        kept = old if _is_alike(old, new) else new
        if isinstance(new, Tensor):
            kept = self._tensor(old, new)
        self._placed[id(new)] = new, kept
        if kept is old:
            self._filled.add(id(old))
            if not isinstance(new, Tensor):
                kept = self._refill(old, new)
                self._placed[id(new)] = new, kept
        return kept

    def _refill(self, old: Any, new: Any) -> Any:
        """`old` with what `new` holds, of which each item has been fitted."""
        before = self._noted[id(old)][1]
        if type(old) not in _CONTAINERS:
            attributes = vars(new)
            for name, item in list(attributes.items()):
                attributes[name] = self._fit(before.get(name, _ABSENT), item)
        elif isinstance(new, dict):
            names = list(new)
            if id(old) in self._groups:  # an optimizer's state_dict has its groups' keys in another order
                names = [name for name in before if name in new] + [
                    name for name in new if name not in before
                ]
            items = {name: self._fit(before.get(name, _ABSENT), new[name]) for name in names}
            if new is not old or not _same(items.values(), new.values()):
                old.clear()
                for name, item in items.items():  # a Counter's update would add
                    old[name] = item
        elif isinstance(new, set):
            if new is not old:
                old.clear()
                old.update(new)
        else:
            there = (*before, *(_ABSENT for _ in range(len(new) - len(before))))
            fitted = [self._fit(was, item) for was, item in zip(there, new, strict=False)]
            if isinstance(new, tuple):
                return old if _same(fitted, before) else new if _same(fitted, new) else tuple(fitted)
            if new is not old or not _same(fitted, new):
                old.clear()
                old.extend(fitted)
        return old

    def _tensor(self, old: Any, new: Tensor) -> Tensor:
        """The same tensor with the memory of the loaded one, which others may share with it."""
        if new is old or not isinstance(old, Tensor):
            return new
        if {id(old), id(new)} & self._untouchable or _form(old) != _form(new):
            return new
        if old.grad_fn is not None or new.grad_fn is not None or type(new) not in (Tensor, nn.Parameter):
            return new
        old.data = new.data
        return old


def _holds(parts: dict[str, Any], path: str) -> int:
    return sys.getrefcount(parts[path])


def _contents(part: Any) -> Any:
    """A copy of what a container holds; None of anything else."""
    kind = type(part)
    if kind in _DICTS:
        return dict(part)
    return list(part) if kind in _CONTAINERS else None


def _is_alike(old: Any, new: Any) -> bool:
    """Whether `old` can hold what `new` does. Objects that are no containers must have stayed."""
    if old is new or type(old) is not type(new) or type(old) not in _CONTAINERS:
        return old is new
    limits = [(getattr(each, "maxlen", None), getattr(each, "default_factory", None)) for each in (old, new)]
    return limits[0] == limits[1]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    shape = tuple(tensor.shape)
    return type(tensor), tensor.dtype, tensor.device, tensor.layout, shape, tensor.requires_grad


def _same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    ours, theirs = list(some), list(others)
    return len(ours) == len(theirs) and all(one is other for one, other in zip(ours, theirs, strict=True))
