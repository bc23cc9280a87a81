"""Where an iterator, or a file that is read, stands: a value that is another one once it has moved.

Nothing is taken from it, and no code of the recipe's runs. Of a few kinds nothing tells the place
(a scanner of `re`, a file that is read by lines): what a loop carries of them is taken to move, and
has another value each time.
"""

import array
import csv
import gc
import io
import itertools
import operator
import re
from collections import OrderedDict, deque
from contextlib import suppress
from struct import iter_unpack
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any

import numpy as np

from elastic.data.own_files import is_own_class
from elastic.train.words import PLAIN, plain_text

_COUNTED: tuple[Any, ...] = (
    *([], (), {}, {}.values(), {}.items(), set(), range(0), range(2**70), "", b"", bytearray(), deque()),
    *(reversed([]), reversed({}), reversed({}.values()), reversed({}.items()), reversed(deque())),
    iter_unpack("B", b""),
)
_COUNTED_ITERATORS = tuple(type(iter(each)) for each in _COUNTED)
_NUMBERED_ITERATORS = type(iter(array.array("b"))), type(iter(np.zeros(0)))
_TEE: Any = type(itertools.tee(())[0])
_ORDERED: Any = type(iter(OrderedDict[Any, Any]()))
# The second one calls a function, as iter(function, last).
_UNREADABLE = type(re.compile("").scanner("")), type(iter(int, 1)), type(iter(memoryview(b"")))  # type: ignore[attr-defined]
_READER: Any = type(csv.reader(()))
_POOLED = (
    itertools.product,
    itertools.permutations,
    itertools.combinations,
    itertools.combinations_with_replacement,
)
_FRAMED = GeneratorType, CoroutineType, AsyncGeneratorType
_CHAINS: tuple[Any, ...] = (
    itertools.cycle,
    itertools.islice,
    itertools.chain,
    itertools.zip_longest,
    itertools.starmap,
    itertools.repeat,
    zip,
    map,
    filter,
    enumerate,
    itertools.accumulate,
    itertools.takewhile,
    itertools.dropwhile,
    itertools.filterfalse,
    itertools.compress,
    itertools.pairwise,
    itertools.groupby,
    _TEE,
)


def place_of(thing: Any) -> tuple[Any] | None:
    """The value, in a tuple of its own; None for what is no iterator of Python's or NumPy's."""
    if isinstance(thing, _COUNTED_ITERATORS):
        with suppress(OverflowError):  # of iter(range(2**70))
            return (operator.length_hint(thing),)
        return (repr(thing.__reduce__()),)
    if isinstance(thing, _POOLED):  # they hold what they gave last
        given = [each for each in gc.get_referents(thing) if type(each) is tuple]
        return (
            repr(
                [[plain_text(item) if type(item) in PLAIN else id(item) for item in each] for each in given]
            ),
        )
    if isinstance(thing, (*_NUMBERED_ITERATORS, _ORDERED, _TEE)):
        return (_reduced(thing),)
    if isinstance(thing, _FRAMED):
        frame = frame_of(thing)
        return (None if frame is None else frame.f_lasti,)
    if isinstance(thing, np.flatiter):
        return (thing.index,)
    if isinstance(thing, np.nditer):
        return (-1 if thing.finished else thing.iterindex,)
    if isinstance(thing, _READER):
        return (thing.line_num,)
    return (object(),) if isinstance(thing, _UNREADABLE) else None


def file_place(thing: Any) -> tuple[Any] | None:
    """Of a file that is open for reading, and in which a program can go back; None for others."""
    if not isinstance(thing, io.IOBase) or is_own_class(type(thing)):
        return None
    try:
        return (thing.tell(),) if thing.readable() and thing.seekable() else None
    except ValueError:  # it is closed, or cannot do it
        return None
    except OSError:  # `for line in file` has begun, and nothing tells how far it went
        return (object(),)


def frame_of(thing: Any) -> FrameType | None:
    """Of a generator or a coroutine; None once it has ended."""
    names = "gi_frame", "cr_frame", "ag_frame"
    frame: FrameType | None = next(getattr(thing, name) for name in names if hasattr(thing, name))
    return frame


def passes_on(thing: Any) -> bool:
    """Whether it is an iterator of Python's own over other ones."""
    return isinstance(thing, (*_CHAINS, GeneratorType))


def iterators_in(thing: Any) -> list[Any]:
    """Those that it goes over; `zip` and `map` hold theirs in a tuple."""
    held = gc.get_referents(thing)
    held += [item for each in held if type(each) is tuple for item in each]
    return [each for each in held if hasattr(type(each), "__next__")]


def _reduced(thing: Any) -> Any:
    """The place that an iterator's pickle would have; Python's last versions give none for some."""
    try:
        parts = thing.__reduce__()
    except TypeError:
        return object()
    if isinstance(thing, _TEE):
        return parts[2][1]
    if isinstance(thing, _ORDERED):
        return len(parts[1][0])
    return parts[2] if len(parts) > 2 else None
