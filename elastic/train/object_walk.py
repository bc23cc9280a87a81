"""From a few names to the marks of all that hangs on them: bounded, and without the recipe's code.

It follows containers, the attributes of objects of the recipe's own classes and of torch's, those
of the recipe's classes and modules (namespaces.py), what functions close over and have for
defaults, and iterators. It looks at attributes in `vars` and slots alone: no property, comparison
or `__getattr__` of the recipe's runs. What the State saves is left out, and so are this library's
objects and files. Of objects of other libraries without a state_dict it sees the arrays and tensors
in their own attributes.
"""

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from types import (
    BuiltinFunctionType,
    CodeType,
    EllipsisType,
    FrameType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NotImplementedType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic.data.attributes import dict_of, space_of
from elastic.data.own_files import is_own_class
from elastic.errors import ElasticError
from elastic.train.address_hash import kind_of
from elastic.train.callables import is_wrapper, unwrapped, wrapped_by
from elastic.train.dataset_settings import is_kept
from elastic.train.iterator_places import passes_on
from elastic.train.marked_tensor import LeftBehind
from elastic.train.namespaces import is_own_namespace, own_classes
from elastic.train.object_contents import opened
from elastic.train.object_marks import ChosenTensor, Kind, Mark, Rules, Weight, mark_of, storage_of
from elastic.train.object_parts import (
    FREE,
    STRICT,
    Part,
    Place,
    holds_tensors,
    mark_of_cache,
    of_function,
    of_iterator,
    of_library,
    of_namespace,
    of_own,
    of_tensor,
)
from elastic.train.own_code import attributes_of, updated_attributes
from elastic.train.patched import Patch
from elastic.train.structure import named_submodules
from elastic.train.torch_calls import functions_called_by
from elastic.train.values import Values
from elastic.train.words import MANY_ITEMS, PLAIN, as_built_in, hash_of_key, hash_of_many

MANY_OBJECTS = 50_000
DEPTH = 32
_DEPTH_OF_MODULES = 4

_OUTPUT = Rules(rebound=Weight.NONE, in_place=Weight.REFUSED, plain=Weight.SAID)
_OF_LIBRARY = Rules(rebound=Weight.NONE, in_place=Weight.SAID, plain=Weight.NONE)

_MODULE_NAMES = frozenset(vars(nn.Module()))
_OPTIMIZER_NAMES = frozenset({"state", "param_groups"})
_CHOSEN = nn.Module, Optimizer, LRScheduler, type, ModuleType
_SENTINELS = object, EllipsisType, NotImplementedType
_BUILT_IN = str, bytes, int, float, dict, list, tuple, deque, set, frozenset, np.ndarray
_CALLABLES = BuiltinFunctionType, MethodWrapperType, FunctionType, MethodType, functools.partial
_ITERATORS_OF_TORCH = torch.utils.data.dataloader._BaseDataLoaderIter  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Which object is in a place, as the value of its mark."""

    id: int


@dataclass(slots=True, kw_only=True)
class Walk:
    """One look at everything.

    saved: gives the addresses of the storages of the State's tensors; it is called where a tensor
    is met. left_out: ids of objects that are not entered. assigned: attributes that the code of the
    loop assigns. outputs: ids of containers that hooks of modules fill. cells: variables of the
    loop's frames, each with the id of its value, which the functions that close over them do not
    carry by themselves. rewritten: attributes that functions of the loop make from what they
    were, or assign on some of their ways alone. kept: ids of objects and classes whose numbers and
    words are saved with each state. sets: found on the way, those that have no order, with what
    they hold. unreadable: what an error ended the look at, with the error's name.
    """

    saved: Callable[[], set[int]]
    left_out: set[int]
    assigned: frozenset[str] = frozenset()
    outputs: frozenset[int] = frozenset()
    cells: frozenset[tuple[str, int]] = frozenset()
    rewritten: frozenset[str] = frozenset()
    kept: frozenset[int] = frozenset()
    marks: dict[str, Mark] = field(default_factory=dict)
    sets: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)
    _objects: int = 0

    def enter(
        self, path: str, thing: Any, rules: Rules, *, owner: str = "", entry: str = "", depth: int = DEPTH
    ) -> None:
        """Mark an object, or what it holds, under this path."""
        try:
            if isinstance(thing, LeftBehind):
                thing = thing.plain
            if id(thing) in self.left_out or depth < 0:
                return
            if is_step(thing):  # its number tells one from another
                thing = dict_of(thing).get("number")
            is_saved = self._is_saved(thing)
            mark = None if is_saved else mark_of(thing, rules, owner, entry)
            if mark is not None and mark.kind is Kind.PLAIN:
                self.marks.setdefault(path, mark)
                return
            place = Place(path=path, rules=rules, owner=owner, entry=entry, depth=depth - 1)
            if isinstance(thing, _CHOSEN) or type(thing) in _SENTINELS:
                self._note_choice(path, thing, place)
            elif is_saved and isinstance(thing, Tensor) and not entry:
                self.marks.setdefault(
                    path, Mark(kind=Kind.PLAIN, value=ChosenTensor.of(thing), rules=rules, owner=owner)
                )
            if id(thing) in self._seen or self._objects > MANY_OBJECTS:
                return
            self._seen.add(id(thing))
            self._objects += 1
            if mark is not None:
                self.marks.setdefault(path, mark)
            for part in self._parts(thing, place):
                if id(thing) in self.kept and is_kept(part.thing) and "." in part.path:
                    continue
                self.enter(part.path, part.thing, part.rules, owner=part.owner, entry=entry, depth=part.depth)
        except ElasticError:
            raise
        except Exception as error:  # by code of an object's class that Python or torch asks on the way
            self.unreadable.setdefault(path, type(error).__name__)

    def module_of_state(self, path: str, module: nn.Module) -> None:
        """What its state_dict leaves out: plain attributes, and buffers that are not persistent."""
        kinds = set[type]()
        for name, each in named_submodules(path, module):
            self._seen.add(id(each))
            for buffer in each._non_persistent_buffers_set:  # noqa: SLF001
                value = each._buffers.get(buffer)  # noqa: SLF001
                is_updated = buffer in updated_attributes(type(each)) or buffer in self.assigned
                rules = FREE if is_updated else replace(FREE, rebound=Weight.SAID)
                self.enter(f"{name}.{buffer}", value, rules, owner="buffer", entry=path)
            self._attributes_of_module(name, each, entry=path)
            for key, tensor in (*each._parameters.items(), *each._buffers.items()):  # noqa: SLF001
                if tensor is not None and space_of(tensor):
                    place = Place(path=f"{name}.{key}", rules=FREE, owner="", entry=path, depth=DEPTH)
                    for part in of_tensor(tensor, place, self.rewritten):
                        self.enter(
                            part.path, part.thing, part.rules, owner="tensor", entry=path, depth=part.depth
                        )
            if type(each) not in kinds:
                kinds.add(type(each))
                for kind in own_classes(each):  # their numbers are kept with the State
                    self.enter(kind.__name__, kind, replace(FREE, plain=Weight.NONE))

    def optimizer_of_state(
        self, path: str, thing: Optimizer | LRScheduler, rules: Rules = FREE, *, entry: str = ""
    ) -> None:
        """What the state_dict of an optimizer or a schedule leaves out: plain attributes.

        entry: of one that has a state_dict of its own, which may leave out its state as well.
        """
        self._seen.add(id(thing))
        owner, kept_by_torch = "optimizer", {"param_groups"} if entry else _OPTIMIZER_NAMES
        if isinstance(thing, LRScheduler):
            owner, kept_by_torch = "schedule", {"optimizer"}
        notes_of_torch = _notes_of_torch(type(thing).__mro__)
        for name, value in vars(thing).items():
            if name not in kept_by_torch and not name.endswith("_hooks"):
                its = replace(rules, plain=Weight.NONE) if name in notes_of_torch else rules
                self.enter(f"{path}.{name}", value, its, owner=owner, entry=entry)

    def functions_of_torch(self, path: str, thing: Optimizer | LRScheduler) -> None:
        """What functions hold that a schedule or an optimizer calls: no state_dict has it.

        Of an object that is called torch saves the attributes.
        """
        for each in functions_called_by(thing):
            if isinstance(each, _CALLABLES):
                self.enter(f"{path}.{getattr(each, '__name__', type(each).__name__)}", each, FREE)
            for kind in own_classes(each):
                self.enter(kind.__name__, kind, FREE)

    def _is_saved(self, thing: Any) -> bool:
        while isinstance(thing, np.ndarray):  # one that a tensor has given has that tensor's memory
            thing = thing.base
        return isinstance(thing, Tensor) and storage_of(thing) in self.saved()

    def _parts(self, thing: Any, place: Place) -> Iterable[Part]:
        if isinstance(thing, _BUILT_IN) and is_own_class(type(thing)):
            return self._of_subclass(thing, place)
        return self._of_plain(thing, place)

    def _of_subclass(self, thing: Any, place: Place) -> Iterator[Part]:
        """Of a class of the recipe's that inherits from one of Python's: it may have attributes."""
        yield from self._of_plain(thing, place)
        self._note_choice(place.path, type(thing), place)
        yield from of_own(thing, place, self.rewritten)

    def _of_plain(self, thing: Any, place: Place) -> Iterable[Part]:
        if isinstance(thing, (str, bytes, int, float, CodeType, FrameType)):
            return ()
        if isinstance(thing, Tensor):
            return of_tensor(thing, place, self.rewritten)
        if isinstance(thing, np.ndarray):
            numbered = enumerate(thing.flat) if thing.dtype.hasobject else ()
            items = [place.part("{}[{}]", place.path, each, n) for n, each in islice(numbered, MANY_ITEMS)]
            mask = [thing._mask] if isinstance(thing, np.ma.MaskedArray) else []  # type: ignore[attr-defined]  # noqa: SLF001 - no copy
            return [*items, *(place.part("{}.mask", place.path, each) for each in mask)]
        if isinstance(thing, (type, ModuleType)):
            if not is_own_namespace(thing):
                return ()
            return of_namespace(thing, place, assigned=self.assigned, rewritten=self.rewritten)
        if isinstance(thing, (dict, list, tuple, deque, set, frozenset)):
            return self._of_container(thing, place)
        if passes_on(thing):
            parts = of_iterator(thing, place)
            if parts is None:
                self.marks.pop(place.path, None)
            return parts or ()
        if isinstance(thing, _ITERATORS_OF_TORCH):
            number = Mark(kind=Kind.ITERATOR, value=thing._num_yielded, rules=STRICT, owner=place.owner)  # noqa: SLF001
            self.marks.setdefault(place.path, number)
            return ()
        if isinstance(thing, torch.utils.data.DataLoader):
            held = (thing.generator, getattr(thing.sampler, "generator", None))
            return [place.part("{}.generator", place.path, each) for each in held if each is not None]
        if isinstance(thing, _CALLABLES) or (is_wrapper(thing) and not is_own_class(type(thing))):
            return self._of_callable(thing, place)
        if (contents := opened(thing)) is not None:
            return [place.part("{}{}", place.path, each, end) for end, each in contents]
        return self._of_instance(thing, place)

    def _of_callable(self, thing: Any, place: Place) -> Iterable[Part]:
        match thing:
            case BuiltinFunctionType() | MethodWrapperType():  # random.Random(0).random
                bound = thing.__self__
                is_code = isinstance(bound, (ModuleType, type, Tensor))
                return () if is_code else [place.part("{}", place.path, bound)]
            case FunctionType():
                self._note_choice(place.path, thing.__code__, place)
                return of_function(thing, place, self.cells)
            case MethodType():
                function = thing.__func__
                self._note_choice(place.path, getattr(function, "__code__", function), place)
                return [place.part("{}", place.path, thing.__self__)]
            case functools.partial():
                given = (
                    place.part("{}.args", place.path, thing.args),
                    place.part("{}.keywords", place.path, thing.keywords),
                )
                held = [place.part("{}.{}", place.path, each, name) for name, each in vars(thing).items()]
                return [place.part("{}", place.path, thing.func), *given, *held]
            case _:
                if (mark := mark_of_cache(thing, place)) is not None:
                    self.marks.setdefault(f"{place.path}.cache_info()", mark)
                return [place.part("{}", place.path, each) for each in wrapped_by(thing)]

    def _of_container(self, thing: Any, place: Place) -> Iterable[Part]:
        if id(thing) in self.outputs:
            place = replace(place, rules=replace(_OUTPUT, plain=Weight.NONE))
        thing = as_built_in(thing)
        if isinstance(thing, dict):
            of_class = OrderedDict if isinstance(thing, OrderedDict) else dict  # whose order is its own
            return self._items(thing, place, of_class.items(thing), "{}[{!r}]")
        if isinstance(thing, (list, tuple)):
            every = -(-len(thing) // MANY_ITEMS) or 1
            numbered = zip(range(0, len(thing), every), thing[::every], strict=True)
            return self._items(thing, place, numbered, "{}[{}]")
        if isinstance(thing, deque):
            return self._items(thing, place, enumerate(thing), "{}[{}]")
        if (kind := kind_of(thing)) is not None:
            self.sets[place.path] = kind
        keys = ((each, hash_of_key(each)) for each in thing)
        plain = (each if type(each) in PLAIN else key for each, key in keys if key is not None)
        return self._items(thing, place, enumerate(plain), "{}[{}]")

    def _items(self, thing: Any, place: Place, items: Iterable[tuple[Any, Any]], form: str) -> Iterator[Part]:
        """A container's mark: its length, its numbers and words, and keys that hash by their value.

        Of a large one a part. What is kept of an object of the State may have other keys there.
        """
        rules = place.rules
        is_sequence = not isinstance(thing, (dict, set, frozenset))
        numbers, has_contents, are_plain = list[Any](), False, True
        has_keys = isinstance(thing, dict) and not place.entry
        for count, (name, item) in enumerate(items):
            if count >= MANY_ITEMS:
                break
            if has_keys and (key := hash_of_key(name)) is not None:
                numbers.append(key)
            if type(item) in (bool, int, float, str, type(None)):
                numbers.append(hash(item) if type(item) is str else item)
                continue
            has_contents, are_plain = has_contents or holds_tensors(item), False
            yield place.part(form, place.path, item, name)
        numbers += hash_of_many(thing) if are_plain else ()
        plain = rules.rebound if has_contents and is_sequence else rules.plain
        mark = Mark(
            kind=Kind.PLAIN,
            value=(len(thing), tuple(numbers)),
            rules=replace(rules, plain=plain),
            owner="list" if is_sequence else "dict",
            entry=place.entry,
        )
        self.marks.setdefault(place.path, mark)

    def note_which(self, path: str, thing: object) -> None:
        """Which object a variable names, where no mark says more."""
        known = self.marks.get(path)
        if known is None or (known.kind is Kind.PLAIN and isinstance(known.value, _Chosen)):
            self.marks[path] = Mark(kind=Kind.PLAIN, value=_Chosen(id(thing)), rules=FREE)

    def note_patch(self, patch: Patch) -> None:
        """A function that the loop puts into a library changes what every process computes."""
        if patch.is_code or patch.value is None:
            rules = STRICT if patch.is_of_library else FREE
            value = _Chosen(id(patch.chosen))
            self.marks.setdefault(
                patch.name, Mark(kind=Kind.PLAIN, value=value, rules=rules, owner="library")
            )
        else:
            self.enter(patch.name, patch.value, FREE.at_most(Weight.SAID))

    def _note_choice(self, path: str, chosen: object, place: Place) -> None:
        """Which object or function is in a place: it may be another one later."""
        value = _Chosen(id(chosen))
        mark = Mark(kind=Kind.PLAIN, value=value, rules=place.rules, owner=place.owner, entry=place.entry)
        self.marks.setdefault(path, mark)

    def _of_instance(self, thing: Any, place: Place) -> Iterable[Part]:
        kind = type(thing)
        if kind is Values:
            return [
                replace(place.part("{}.{}", place.path, value, name), rules=STRICT, owner="values")
                for name, value in vars(thing).items()
            ]
        if kind.__module__.partition(".")[0] == "elastic":
            return ()
        if isinstance(thing, nn.Module):
            return self._of_module(thing, place)
        if isinstance(thing, Optimizer):
            held = ("state", thing.state), ("param_groups", thing.param_groups)
            return [
                replace(place.part("{}.{}", place.path, value, name), owner="module") for name, value in held
            ]
        if is_own_class(kind):
            self._note_choice(place.path, kind, place)
            # A hook may keep features of some forwards alone, for what is read right after them.
            return of_own(thing, place, frozenset() if id(thing) in self.outputs else self.rewritten)
        if isinstance(thing, torch.distributions.Distribution):
            return [place.part("{}.{}", place.path, value, name) for name, value in attributes_of(thing)]
        if hasattr(kind, "state_dict"):
            return (place.part("{}.{}", place.path, value, name) for name, value in attributes_of(thing))
        return of_library(thing, place, self.assigned)

    def _of_module(self, module: nn.Module, place: Place) -> Iterator[Part]:
        for name, each in module.named_modules():
            path = f"{place.path}.{name}" if name else place.path
            self._seen.add(id(each))
            for key, tensor in (*each._parameters.items(), *each._buffers.items()):  # noqa: SLF001
                if tensor is not None:
                    yield replace(place.part("{}.{}", path, tensor, key), owner="module")
            self._attributes_of_module(path, each)
            for kind in own_classes(each):
                yield replace(place.part("{}", kind.__name__, kind), rules=FREE, owner="")

    def _attributes_of_module(self, path: str, module: nn.Module, entry: str = "") -> None:
        """A tensor that a forward leaves in an attribute is its output, and may be another one."""
        rules = None
        for name, value in vars(module).items():
            is_mode = name == "training" and not entry
            if (name in _MODULE_NAMES and not is_mode) or (entry and _is_plain(value)):
                continue  # kept with the State
            if not isinstance(value, nn.Module):
                rules = rules or (_OUTPUT if is_own_class(type(module)) else _OF_LIBRARY)
                is_assigned = name in self.assigned and rules is _OUTPUT
                its = replace(rules, rebound=Weight.SAID) if is_assigned else rules
                its = replace(its, plain=Weight.SAID)  # a loss's beta, a list that the loop appends to
                self.enter(
                    f"{path}.{name}", value, its, owner="attribute", entry=entry, depth=_DEPTH_OF_MODULES
                )


def is_step(thing: Any) -> bool:
    """Whether it is a step of the run."""
    kind = type(thing)
    return kind.__name__ == "Step" and kind.__module__ == "elastic.train.step"


def _is_plain(thing: Any) -> bool:
    """A number, a string, or a tuple of them alone."""
    return type(thing) in PLAIN or (type(thing) is tuple and all(type(each) in PLAIN for each in thing))


@functools.cache
def _notes_of_torch(kinds: tuple[type, ...]) -> frozenset[str]:
    """The private names that methods of torch's own classes, or a schedule, mention."""
    methods = (each for base in kinds if base.__module__.startswith("torch.") for each in vars(base).values())
    code = [function.__code__ for each in methods if callable(each) for function in unwrapped(each)]
    names = {"_opt_called"}.union(*(each.co_names for each in code))
    return frozenset(name for name in names if name.startswith("_"))
