"""What a function could change outside its result is found without running any code of its own.

Followed are the modules of a state, what the function's closure, globals, defaults, attributes and
bound object hold, and from there modules, objects, classes and functions of the recipe's own code,
containers, tensors, arrays and random generators. Each place is a `Site`, whose content can be read
and put back.

It is bounded, and so is not complete: it leaves out what installed packages keep for themselves,
objects with __slots__, items of a container beyond the first thousand, and what is no plain Python
(an iterator, an open file). Parameters and buffers of a state's modules are the business of others
(forward_changes.py, buffers.py).
"""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic.data.own_files import is_own_class, is_own_file
from elastic.train import structure
from elastic.train.callables import bound_by, is_wrapper, wrapped_by
from elastic.train.own_code import cell_contents
from elastic.train.site import CACHED, MODULES_OWN, Form, Site, is_plain_attribute, note, put_back
from elastic.train.state import State
from elastic.train.values import Values

MAX_SITES = 20_000
MAX_ITEMS = 1000  # of one container that are followed

_MODE = frozenset({"training"})
_MAPPINGS = dict, defaultdict, OrderedDict, Counter
_NUMPY_GENERATORS = np.random.Generator, np.random.RandomState
_GENERATORS = torch.Generator, random.Random, *_NUMPY_GENERATORS


def sites_of(state: State, functions: Iterable[Callable[..., Any]]) -> list[Site]:
    """All places that these functions, and the modules of the state, could change.

    Also the modes of other modules. Those of the state's own are another's business (modes.py).
    """
    walk = _Walk(modules := structure.submodules(state.modules))
    for name, thing in state.objects.items():
        for part in structure.held(thing):
            if isinstance(part, nn.Module):
                walk.add(name, part)
    for function in functions:
        walk.add("", function)
    sites = walk.found()
    own = set(map(id, modules))
    return [*sites, *(_mode_of(path, each) for path, each in walk.paths if id(each) not in own)]


def sites_below(state: State, name: str, thing: Any, left_out: Iterable[Any]) -> list[Site]:
    """All places below one object, but for these and what the modules of the state save."""
    walk = _Walk(structure.submodules(state.modules), left_out)
    walk.add(name.rpartition(": ")[2], thing)
    return walk.found()


def sites_around(state: State, named: Iterable[tuple[str, Any]]) -> tuple[list[Site], list[nn.Module]]:
    """All places below the objects of a state and below these, and the modules that were met."""
    walk = _Walk(structure.submodules(state.modules))
    for name, thing in (*state.objects.items(), *named):
        walk.add(name, thing)
    return walk.found(), walk.modules


@contextmanager
def kept(state: State, functions: Iterable[Callable[..., Any]], copied_bytes: int) -> Iterator[None]:
    """What these functions change inside is put back. copied_bytes: of one tensor, at most."""
    sites = sites_of(state, functions)
    before = note(sites, copied_bytes=copied_bytes)
    try:
        yield
    finally:
        put_back(sites, before)


def sites_outside(modules: Iterable[nn.Module], function: Callable[..., Any]) -> list[Site]:
    """All places that a function could change, but for the tensors of these modules."""
    walk = _Walk(structure.submodules(modules))
    walk.add("", function)
    return walk.found()


def read_by(function: Callable[..., Any]) -> tuple[list[Site], list[nn.Module]]:
    """All places that a function could read, and the modules that it could call, each once."""
    walk = _Walk([])
    walk.add("", function)
    return walk.found(), walk.modules


def _mode_of(path: str, module: nn.Module) -> Site:
    return Site(path=path, form=Form.NAMES, thing=vars(module), names=_MODE, is_of_module=True)


class _Walk:
    """Breadth first, each object once.

    modules: whose tensors are left out. left_out: objects that are left out too.
    """

    def __init__(self, modules: Sequence[nn.Module], left_out: Iterable[Any] = ()) -> None:
        self.modules: list[nn.Module] = []  # that were met
        self.paths: list[tuple[str, nn.Module]] = []  # the same, each with its path
        self._left_out = {id(tensor) for module in modules for tensor in _tensors(module)}
        self._left_out |= set(map(id, left_out))
        self._seen: dict[int, Any] = {}  # by id; kept, so that no other object gets it
        self._sites: list[Site] = []
        self._waiting: deque[tuple[str, Any, bool]] = deque()

    def add(self, path: str, thing: Any, *, is_of_module: bool = False) -> None:
        if not isinstance(thing, str | int | float | bytes | ModuleType | None):
            self._waiting.append((path, thing, is_of_module))

    def found(self) -> list[Site]:
        while self._waiting and len(self._sites) < MAX_SITES:
            path, thing, is_of_module = self._waiting.popleft()
            if id(thing) not in self._seen and id(thing) not in self._left_out:
                self._seen[id(thing)] = thing
                self._visit(path, thing, is_of_module)
        return self._sites

    def _visit(self, path: str, thing: Any, is_of_module: bool) -> None:
        match thing:
            case nn.Module():
                self._visit_module(path, thing)
            case Tensor():
                # One without plain memory of its own, such as a sparse one, cannot be put back.
                is_plain = type(thing) in (Tensor, nn.Parameter, nn.Buffer)
                if is_plain and thing.layout is torch.strided and not thing.is_inference():
                    self._found(path, Form.TENSOR, thing, is_of_module)
            case np.ndarray():
                if type(thing) is np.ndarray and thing.flags.writeable and not thing.dtype.hasobject:
                    self._found(path, Form.ARRAY, thing, is_of_module)
            case _ if isinstance(thing, _GENERATORS):
                self._found(path, Form.GENERATOR, thing, is_of_module)
            case _ if is_wrapper(thing) and not is_own_class(type(thing)):
                self._visit_callable(path, thing)
            case tuple():
                self._add_items(path, enumerate(thing), is_of_module)
            case set():
                self._found(path, Form.SET, thing, is_of_module)
            case _ if type(thing) in _MAPPINGS:
                self._found(path, Form.MAPPING, thing, is_of_module)
                self._add_items(path, thing.items(), is_of_module)
            case list() | deque() if type(thing) in (list, deque):
                self._found(path, Form.SEQUENCE, thing, is_of_module)
                self._add_items(path, enumerate(thing), is_of_module)
            case type() if is_own_class(thing):
                del self._seen[id(thing)]  # it is noted there, as the classes that it inherits from
                self._visit_class(thing, is_of_module=False)
            case _ if isinstance(thing, Values) or is_own_class(type(thing)):
                self._visit_instance(path, thing)
            case _:
                pass

    def _found(self, path: str, form: Form, thing: Any, is_of_module: bool) -> None:
        self._sites.append(Site(path=path, form=form, thing=thing, is_of_module=is_of_module))

    def _add_items(self, path: str, items: Iterable[tuple[Any, Any]], is_of_module: bool) -> None:
        for (key, item), _ in zip(items, range(MAX_ITEMS), strict=False):
            self.add(f"{path}[{key!r:.40}]", item, is_of_module=is_of_module)

    def _visit_module(self, path: str, module: nn.Module) -> None:
        self.modules.append(module)
        self.paths.append((path, module))
        attributes = vars(module)
        self._found(path, Form.NAMES, attributes, is_of_module=True)
        for name, value in attributes.items():
            if name not in MODULES_OWN:
                self.add(f"{path}.{name}", value, is_of_module=True)
        for tensor_name, tensor in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001
            self.add(f"{path}.{tensor_name}", tensor, is_of_module=True)
        for child_name, child in module._modules.items():  # noqa: SLF001
            self.add(f"{path}.{child_name}", child)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):  # noqa: SLF001
            for hook in hooks.values():
                self.add("", hook)
        self._visit_class(type(module), is_of_module=True)

    def _visit_instance(self, path: str, thing: Any) -> None:
        """Of the recipe's own class; an optimizer changes what it updates, not what it computes."""
        try:
            attributes = object.__getattribute__(thing, "__dict__")
        except AttributeError:
            return
        if isinstance(thing, (type, Optimizer)) or type(attributes) is not dict:
            return
        self._found(path, Form.NAMES, attributes, is_of_module=False)
        for name, value in attributes.items():
            self.add(f"{path}.{name}" if path else name, value)
        self._visit_class(type(thing), is_of_module=False)

    def _visit_class(self, kind: type, *, is_of_module: bool) -> None:
        for each in kind.__mro__:
            if id(each) in self._seen or not is_own_class(each):
                continue
            self._seen[id(each)] = each
            self._found(each.__name__, Form.CLASS, each, is_of_module)
            for name, value in vars(each).items():
                if is_wrapper(value):
                    self.add("", value)
                elif is_plain_attribute(name, value):
                    self.add(f"{each.__name__}.{name}", value, is_of_module=is_of_module)

    def _visit_callable(self, path: str, function: Any) -> None:
        for each in wrapped_by(function):
            self.add(path if isinstance(function, partial) else "", each)
        if isinstance(function, CACHED):
            self._found(path or function.__name__, Form.CACHE, function, is_of_module=False)
        match function:
            case partial():
                for _, part in bound_by(function):
                    self.add(path, part)
            case MethodType():
                self.add(path or type(function.__self__).__name__, function.__self__)
            case FunctionType() if is_own_file(function.__code__.co_filename):
                self._visit_function(function)
            case _:
                pass

    def _visit_function(self, function: FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._found(name, Form.CELL, cell, is_of_module=False)
            for value in cell_contents(cell):
                self.add(name, value)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.add("a default argument", default)
        own = vars(function)
        self._found(function.__name__, Form.NAMES, own, is_of_module=False)
        for name, value in own.items():
            self.add(f"{function.__name__}.{name}", value)
        names = frozenset(_names(function.__code__))
        known = function.__globals__
        self._sites.append(Site(path="", form=Form.NAMES, thing=known, names=names))
        for name in sorted(names & known.keys()):  # the same path for a thing on every rank
            self.add(name, known[name])


def _names(code: CodeType) -> Iterator[str]:
    """Names of globals, and of attributes, that the code and the functions inside it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for tensors in (module._parameters, module._buffers):  # noqa: SLF001
        yield from (tensor for tensor in tensors.values() if tensor is not None)
