"""A place whose content a recipe's code can change; it is read, and put back as it was.

Neither runs any code of the recipe's. What a tensor or an array holds is put back only where it was
copied, which is bounded in size.
"""

import functools
import gc
import random
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastic.train.own_code import cell_contents

Content = dict[Any, Any]  # what a site holds, by its key; () for a site with one value
WHOLE = ()
VERSION = "version"  # beside the whole content of a tensor: autograd's count of changes
COPIED_BYTES = 2**24  # of one tensor or array, where a function's first call is looked at
ALL_COPIED_BYTES = 2**26  # of tensors and arrays
CACHED = type(functools.cache(lambda: None))
MODULES_OWN = frozenset(vars(nn.Module()))  # what every module has: parameters, hooks, its mode


class Form(Enum):
    NAMES = "attributes or globals, in the dict of their names"
    CLASS = "attributes of a class"
    CELL = "a variable of an enclosing function"
    MAPPING = "a dict"
    SEQUENCE = "a list or a deque"
    SET = "a set"
    TENSOR = "the numbers in a tensor"
    ARRAY = "the numbers in an array"
    GENERATOR = "the state of a random generator"
    CACHE = "the results that functools.cache keeps"


BY_NUMBERS = Form.TENSOR, Form.ARRAY, Form.GENERATOR  # their one value is under WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place with a content that code can change.

    path: as a recipe would write it. names: of globals, those that the function knows; None for all
    attributes of an object. is_of_module: a module holds it, or something that a module holds.
    """

    path: str
    form: Form
    thing: Any
    names: frozenset[str] | None = None
    is_of_module: bool = False

    def name_of(self, key: Any) -> str:
        """The path of one key."""
        match self.form:
            case Form.NAMES | Form.CLASS:
                return f"{self.path}.{key}" if self.path else str(key)
            case Form.MAPPING:
                return f"{self.path}[{key!r:.40}]"
            case _:
                return self.path

    def read(self, *, copies: bool) -> Content:
        """The content now. copies: of tensors and arrays too, else their count of changes."""
        thing = self.thing
        match self.form:
            case Form.NAMES if self.names is not None:
                return {name: thing[name] for name in self.names if name in thing}
            case Form.NAMES:
                return {name: value for name, value in thing.items() if name not in MODULES_OWN}
            case Form.CLASS:
                return {name: value for name, value in vars(thing).items() if is_plain_attribute(name, value)}
            case Form.CELL:
                return dict(zip([WHOLE], cell_contents(thing), strict=False))  # none if it is empty
            case Form.MAPPING:
                return dict(thing)
            case Form.SEQUENCE:
                return dict(enumerate(thing))
            case Form.SET:
                return {item: item for item in thing}
            case Form.TENSOR:
                version = thing._version  # noqa: SLF001 - autograd's count of changes
                copy = thing.detach().clone() if copies else (version, thing.data_ptr())
                return {WHOLE: copy, VERSION: version}
            case Form.ARRAY:
                return {WHOLE: thing.copy()} if copies else {}
            case Form.GENERATOR:
                return {WHOLE: _generator_state(thing)}
            case Form.CACHE:
                return _results_of(thing)

    def write(self, content: Content) -> None:
        """Put back what `read` gave.

        A tensor or array that was not copied stays as it is, and so does a cache that held
        something: it can only be emptied.
        """
        thing, now = self.thing, self.read(copies=False)
        match self.form:
            case Form.NAMES:
                for name in now.keys() - content.keys():
                    del thing[name]
                thing.update(
                    {name: value for name, value in content.items() if now.get(name, now) is not value}
                )
            case Form.CLASS:
                for name in now.keys() - content.keys():
                    type.__delattr__(thing, name)
                for name, value in content.items():
                    if now.get(name, now) is not value:
                        type.__setattr__(thing, name, value)
            case Form.CELL:
                if content:
                    thing.cell_contents = content[WHOLE]
                elif now:
                    del thing.cell_contents
            case Form.MAPPING | Form.SET | Form.SEQUENCE:
                if (
                    list(map(id, now.values())) != list(map(id, content.values()))
                    or now.keys() != content.keys()
                ):
                    thing.clear()
                    add = thing.extend if self.form is Form.SEQUENCE else thing.update
                    add(content if self.form is Form.MAPPING else content.values())
            case Form.TENSOR if isinstance(content[WHOLE], Tensor):
                copy, version = content[WHOLE], content[VERSION]
                if thing.shape != copy.shape or thing.dtype != copy.dtype:
                    thing.data = copy
                else:
                    thing.data.copy_(copy)
                torch._C._autograd._unsafe_set_version_counter((thing,), (version,))  # noqa: SLF001
            case Form.ARRAY if content:
                thing[...] = content[WHOLE]
            case Form.GENERATOR:
                _set_generator_state(thing, content[WHOLE])
            case Form.CACHE if now and not content:
                thing.cache_clear()
            case Form.TENSOR | Form.ARRAY | Form.CACHE:
                pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What sites held at one moment, in their order.

    It refers to the values themselves, so that none of them can be replaced by another one with the
    same id; tensors and arrays are copied, up to a size.
    """

    contents: list[Content]


def note(sites: list[Site], *, copied_bytes: int) -> Note:
    """copied_bytes: of one tensor or array, at most."""
    left, contents = ALL_COPIED_BYTES, []
    for site in sites:
        size = site.thing.nbytes if site.form in (Form.TENSOR, Form.ARRAY) else 0
        copies = size <= min(left, copied_bytes)
        left -= size * copies
        contents.append(site.read(copies=copies))
    return Note(contents=contents)


def put_back(sites: list[Site], before: Note) -> None:
    for site, content in zip(sites, before.contents, strict=True):
        site.write(content)


def is_plain_attribute(name: str, value: Any) -> bool:
    is_code = (callable(value) and not isinstance(value, nn.Module)) or isinstance(
        value, property | classmethod | staticmethod
    )
    return not name.startswith("__") and not is_code and not hasattr(type(value), "__get__")


def _results_of(cached: Any) -> Content:
    """By a text of the arguments; objects among these are told apart by their ids.

    The garbage collector knows what the cache refers to: its dict, whose values are the results
    or, where the cache is bounded, entries that keep key and result one behind the other.
    """
    found = gc.get_referents(cached)
    known = next((each for each in found if type(each) is dict and each is not vars(cached)), {})
    after = {id(one): other for one, other in pairwise(found)}
    is_bounded = cached.cache_parameters()["maxsize"] is not None
    results = [after.get(id(key)) if is_bounded else value for key, value in known.items()]
    return {_text_of(key): result for key, result in zip(known, results, strict=True)}


def _text_of(key: Any) -> str:
    if isinstance(key, tuple):
        return f"({', '.join(map(_text_of, key))})"
    return repr(key) if type(key) in (str, int, float, bool, type(None)) else f"#{id(key)}"


def _generator_state(generator: Any) -> Any:
    match generator:
        case torch.Generator():
            return bytes(generator.get_state().numpy())
        case random.Random():
            return generator.getstate()
        case np.random.Generator():
            return generator.bit_generator.state
        case _:
            return generator.get_state()


def _set_generator_state(generator: Any, state: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        case random.Random():
            generator.setstate(state)
        case np.random.Generator():
            generator.bit_generator.state = state
        case _:
            generator.set_state(state)
