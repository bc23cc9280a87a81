"""What the recipe's own variables hold at the end of a step, as texts that can be compared.

Roots are the variables of the frame that takes the steps, of those above it in the recipe's files
and of their modules, and the State's modules and the dataset. Everything reached from them lies at
most DEPTH attributes or elements away. Nothing is predicted: two executions are compared, and a
name tells what differs. It does not see what no variable reaches, what a longer list holds, and
what comes after the bounds below.
"""

import hashlib
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from inspect import getclosurevars, signature
from itertools import islice
from types import BuiltinFunctionType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastic.proof.evidence import CUT, SHOWN, STATE
from elastic.snapshot.sharded import is_sharded
from elastic.worker.preload import is_installed

DEPTH, MOST_VALUES, MOST_ELEMENTS, MOST_BYTES, LONGEST_S = 3, 2000, 100, 64 << 20, 0.1
LONGEST_TEXT = 200

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OF_MODULES = frozenset(vars(nn.Module()))
_NO_DATA = (ModuleType, BuiltinFunctionType, MethodType, type)


def is_recipes_own(file: str | None) -> bool:
    """Whether a file is the recipe's, and not of an installed library, of Python or of this one."""
    return file is not None and not file.startswith("<") and not is_installed(file)


def variables_of(frame: FrameType | None) -> dict[str, Any]:
    """Of the recipe's frames from this one up, and of their modules; the innermost of a name
    counts.
    """
    found: dict[str, Any] = {}
    while frame is not None:
        if is_recipes_own(frame.f_globals.get("__file__")):
            for name, value in (frame.f_globals | frame.f_locals).items():
                if not name.startswith("__") and not isinstance(value, _NO_DATA):
                    found.setdefault(name, value)
        frame = frame.f_back
    return found


class Collector:
    """Texts by name. held: ids of what the State saves, which is compared as the State is."""

    def __init__(self, checksum: Callable[[Tensor], str], cpu_s: Callable[[], float], held: set[int]) -> None:
        self.texts: dict[str, str] = {}
        self._checksum = checksum
        self._cpu_s = cpu_s
        self._until_s = cpu_s() + LONGEST_S
        self._seen = set(held)
        self._bytes = 0

    def add(self, name: str, value: Any, depth: int = 0) -> None:
        if len(self.texts) >= MOST_VALUES or self._cpu_s() > self._until_s:
            self.texts[CUT] = SHOWN
            return
        if isinstance(value, _PLAIN):
            self.texts[name] = SHOWN + _shortened(repr(value))
            return
        if id(value) in self._seen or isinstance(value, _NO_DATA):
            return
        self._seen.add(id(value))
        # The recipe's objects may raise whatever they like; then they say nothing.
        with suppress(Exception):
            if (text := self._state_text(value)) is not None:
                self.texts[name] = STATE + text
            elif depth < DEPTH:
                for part, each in self._parts(name, value):
                    self.add(part, each, depth + 1)

    def add_attributes(self, name: str, thing: object) -> None:
        """The plain ones of a module of the State, or of the dataset: a load does not set them."""
        for key, value in _attributes(thing):
            if key not in _OF_MODULES and isinstance(value, (*_PLAIN, list, tuple, dict, set, deque)):
                self.add(f"{name}.{key}", value, DEPTH - 1)

    def _state_text(self, value: Any) -> str | None:
        """The state of a tensor, an array or a generator of random numbers; None for anything
        else.
        """
        if isinstance(value, torch.Generator):
            return self._checksum(value.get_state())
        if isinstance(value, random.Random):
            return _digest(repr(value.getstate()))
        if isinstance(value, np.random.Generator):
            return _digest(repr(value.bit_generator.state))
        if isinstance(value, np.random.RandomState):
            return _digest(repr(value.get_state()))
        if not isinstance(value, Tensor | np.ndarray) or is_sharded(value):  # whose checksum all ranks gather
            return None
        self._bytes += value.nbytes
        if self._bytes > MOST_BYTES or (isinstance(value, np.ndarray) and value.dtype.hasobject):
            self.texts[CUT] = SHOWN
            return None
        tensor = torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value.detach()
        return self._checksum(tensor)

    def _parts(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, nn.Module):
            for key, each in value.state_dict(keep_vars=True).items():
                yield f"{name}.{key}", each
        if isinstance(value, Mapping):
            yield f"len({name})", len(value)
            yield from ((f"{name}[{key!r:.40}]", each) for key, each in islice(value.items(), MOST_ELEMENTS))
        elif isinstance(value, list | tuple | deque):
            yield f"len({name})", len(value)
            if len(value) <= MOST_ELEMENTS:
                yield from ((f"{name}[{place}]", each) for place, each in enumerate(value))
        elif isinstance(value, set | frozenset):
            yield f"len({name})", len(value)
        elif isinstance(value, ContextVar):
            yield f"{name}.value", value.get(None)
        elif isinstance(value, partial):
            yield from ((f"{name}.args[{place}]", each) for place, each in enumerate(value.args))
            yield from ((f"{name}.{key}", each) for key, each in value.keywords.items())
        elif isinstance(value, FunctionType):
            yield from ((f"{name}.{key}", each) for key, each in _kept_by(value))
        elif isinstance(value, GeneratorType):
            if (frame := value.gi_frame) is not None:
                yield f"the place in {name}", frame.f_lasti
                yield from ((f"{name}.{key}", each) for key, each in frame.f_locals.items())
        elif isinstance(value, threading.local) or is_recipes_own(_file_of(type(value))):
            yield from ((f"{name}.{key}", each) for key, each in _attributes(value))
        elif isinstance(value, Iterator):  # those of Python say where they are, as for a copy
            yield f"the place in {name}", value.__reduce__()[1:]


def _kept_by(function: FunctionType) -> list[tuple[str, Any]]:
    """What a function of the recipe's holds besides its code: defaults, and variables around it."""
    if not is_recipes_own(function.__globals__.get("__file__")):
        return []
    parameters = signature(function).parameters.values()
    kept = {each.name: each.default for each in parameters if each.default is not each.empty}
    return list({**kept, **getclosurevars(function).nonlocals}.items())


def _attributes(thing: object) -> list[tuple[str, Any]]:
    """Those of its own, in `__dict__` and in slots."""
    own = dict(getattr(thing, "__dict__", {}))
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, key):
                own.setdefault(key, getattr(thing, key))
    return [(key, value) for key, value in own.items() if not key.startswith("__")]


def _file_of(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}… {_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
