"""A value that is whole in itself, as a short text: numbers, words, dates, paths, hashes, states of
small objects of Python's library.

Two values have one text where they are equal, but for hashes of long ones that happen to be equal.
No code of the recipe's runs.
"""

import datetime as dt
import io
import queue
import re
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection
from contextlib import suppress
from decimal import Context, Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath
from typing import Any

import numpy as np
import torch

from elastic.data.own_files import is_own_class

TEXT = 200
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_WORDS = PLAIN | {
    *(Decimal, Fraction, PosixPath, PurePosixPath, range, slice, torch.dtype, torch.device, torch.Size),
    *(dt.datetime, dt.date, dt.time, dt.timedelta, torch.memory_format, torch.layout, Context),
}
_BY_HASH = Decimal, Fraction, int, str, bytes  # whose texts may be long, or cost much
_HASHES = {"_hashlib", "_blake2", "_md5", "_sha1", "_sha2", "_sha256", "_sha512", "_sha3", "hmac"}
# Modules and packages whose hashable values are constant.
_OF_VALUES = {"datetime", "ipaddress", "numpy", "pandas", "re", "statistics", "sympy", "uuid", "zoneinfo"}
_BY_ADDRESS: Any = object.__hash__
_MOST_BITS = 512
MANY_ITEMS = 1000  # of one container, which are looked at one by one
MANY_PLAIN = 2**17


def as_built_in(thing: Any) -> Any:
    """A container; of one of a class of the recipe's, what it holds without that class's code."""
    if not is_own_class(type(thing)):
        return thing
    if isinstance(thing, dict):
        of_class: Any = OrderedDict if isinstance(thing, OrderedDict) else dict
        return of_class(of_class.items(thing))
    kind: Any = next(each for each in (list, tuple, set, frozenset, deque) if isinstance(thing, each))
    return kind(kind.__iter__(thing))


def word_text(thing: Any) -> str | None:
    """None for what is no such value."""
    kind = type(thing)
    module = kind.__module__.partition(".")[0]
    if kind in _WORDS or isinstance(thing, (np.generic, Enum)):
        return plain_text(thing)
    with suppress(ValueError):  # it is closed; a subclass may have methods of the recipe's
        if isinstance(thing, io.BytesIO):
            return f"{io.BytesIO.tell(thing)} {hash(io.BytesIO.getvalue(thing))}"
        if isinstance(thing, io.StringIO):
            return f"{io.StringIO.tell(thing)} {hash(io.StringIO.getvalue(thing))}"
    if module in _HASHES and hasattr(thing, "digest"):
        size = () if thing.digest_size else (16,)  # of shake_128, as long as is asked for
        return f"{kind.__name__} {thing.digest(*size).hex()}"
    if kind is re.Match and type(thing.string) in (str, bytes):
        return f"Match {thing.span()} {hash(thing.string)}"
    if kind is queue.SimpleQueue:
        return f"SimpleQueue {thing.qsize()}"
    made: Any = kind.__hash__
    if module in _OF_VALUES and made is not None and made is not _BY_ADDRESS:
        with suppress(TypeError):  # some of pandas' have a hash that raises
            return f"{kind.__name__} {hash(thing)}"
    return None


def plain_text(value: Any) -> str:
    """Of any value: its type, and what tells it from others."""
    name = type(value).__name__
    if isinstance(value, Enum):  # without a `__repr__` of the recipe's
        return f"{name}.{object.__getattribute__(value, '_name_')}"
    if type(value) in (str, bytes) and len(value) > TEXT:  # its repr would be another one as long
        return f"{name} {value[:TEXT]!r} {len(value)} {hash(value)}"
    if type(value) is int and value.bit_length() > _MOST_BITS:  # Python refuses to write long ones
        return f"{name} {value.bit_length()} bits {hash(value)}"
    if type(value) is Fraction and value.denominator.bit_length() + value.numerator.bit_length() > _MOST_BITS:
        return f"{name} {hash(value)}"
    text = repr(value)
    if len(text) <= TEXT:
        return f"{name} {text}"
    known = value if type(value) in _BY_HASH else text
    return f"{name} {text[:TEXT]} {len(text)} {hash(known)}"


def hash_of_key(key: Any) -> int | None:
    """Of a number, a word, or a tuple or frozenset of these; None for other keys of dicts."""
    if type(key) in PLAIN:
        return hash(key)
    if type(key) in (tuple, frozenset):
        inside: Collection[Any] = key
        return None if any(hash_of_key(each) is None for each in inside) else hash(key)
    return None


def hash_of_plain(items: Collection[Any]) -> int | None:
    """Of numbers and words alone, at most MANY_PLAIN of them; None for others.

    100 000 take some 5 ms; numbers with a few floats among them more.
    """
    kinds = set(map(type, items)) if len(items) <= MANY_PLAIN else {object}
    if not kinds <= PLAIN:
        return None
    if isinstance(items, (set, frozenset)):  # equal ones may iterate in other orders
        return hash(frozenset(items))
    if kinds == {str}:  # each of which keeps its hash
        return hash(tuple(items))
    if kinds == {float}:
        return hash(array("d", items).tobytes())
    # The hashes of numbers would take -1 for -2, and 1 for True.
    return hash(repr([*items]))


def hash_of_many(thing: Collection[Any]) -> tuple[int, ...]:
    """Of a container with more items than are looked at one by one; empty for others."""
    if len(thing) <= MANY_ITEMS:
        return ()
    found = hash_of_plain(list(dict.values(thing)) if isinstance(thing, dict) else thing)
    return () if found is None else (found,)
