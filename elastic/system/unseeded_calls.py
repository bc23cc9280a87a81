"""Calls that seed a generator of Python's or NumPy's from the operating system, as they happen.

A text does not show that the `seed` of `default_rng(seed)` is None, nor that a library makes such a
generator. What both end in is watched, so that no class or function that a recipe uses is another
one: NumPy asks for entropy by a name of its own, and `random.Random` is seeded by its method
`seed`. Each stack is kept once; which frame is the recipe's own is not known here.

It does not see generators that other compiled code seeds, nor those of other processes.
"""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

Stack = tuple[tuple[CodeType, int], ...]  # code and instruction of each call, the innermost first
_MOST_FRAMES = 60
_MOST_STACKS = 1000


class _Newest(threading.local):
    """call: that has added the newest stack in this thread, as frame, instruction and key.

    is_watched: whether calls of this thread count.
    """

    call: tuple[int, int, tuple[tuple[int, int], ...]] | None = None
    is_watched: bool = True


_newest = _Newest()
_stacks: dict[tuple[tuple[int, int], ...], Stack] = {}


def stacks() -> list[Stack]:
    """In the order in which they were first seen."""
    return [*_stacks.values()]


def number() -> int:
    """Of stacks."""
    return len(_stacks)


@contextmanager
def unwatched() -> Iterator[None]:
    """Calls of this thread do not count: nothing that they make reaches the run."""
    before, _newest.is_watched = _newest.is_watched, False
    try:
        yield
    finally:
        _newest.is_watched = before


def watch_python() -> None:
    """Before a recipe's first line, which may import `seed` by its name."""
    seed = random.Random.seed
    if hasattr(seed, "__wrapped__"):
        return

    @wraps(seed)
    def watched(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            _note(sys._getframe(1))  # noqa: SLF001
        seed(self, a, version)

    random.Random.seed = watched  # type: ignore[method-assign]
    random.seed = random._inst.seed  # noqa: SLF001


def watch_numpy(module: Any) -> None:
    """module: numpy.random. `RandomState(3)` begins as an unseeded one, and then takes its seed.

    A version of NumPy that does so in another way is not watched.
    """
    asks: Any = getattr(module, "bit_generator", None)
    takes: Any = getattr(module, "_mt19937", None)
    draw, numbers = getattr(asks, "randbits", None), getattr(takes, "operator", None)
    if draw is None or numbers is None or hasattr(draw, "__wrapped__"):
        return

    @wraps(draw)
    def watched(k: int) -> int:
        _note(sys._getframe(1))  # noqa: SLF001
        return draw(k)  # type: ignore[no-any-return]

    @wraps(numbers.index)
    def index(seed: object) -> int:
        _take_back(sys._getframe(1))  # noqa: SLF001
        return numbers.index(seed)  # type: ignore[no-any-return]

    asks.randbits, takes.operator = watched, SimpleNamespace(**{**vars(numbers), "index": index})
    before = number()
    module.RandomState(0)
    if number() > before:
        asks.randbits, takes.operator = draw, numbers
        _stacks.popitem()


def _note(frame: FrameType) -> None:
    if not _newest.is_watched:
        return
    found, above = list[tuple[CodeType, int]](), frame
    while above is not None and len(found) < _MOST_FRAMES:
        found.append((above.f_code, above.f_lasti))
        above = above.f_back  # type: ignore[assignment]  # None at the end
    key = tuple((id(code), offset) for code, offset in found)
    _newest.call = None
    if key not in _stacks and len(_stacks) < _MOST_STACKS:
        _stacks[key] = tuple(found)
        _newest.call = id(frame), frame.f_lasti, key


def _take_back(frame: FrameType) -> None:
    """The same call has got a seed after all."""
    if _newest.call is not None and _newest.call[:2] == (id(frame), frame.f_lasti):
        del _stacks[_newest.call[2]]
    _newest.call = None
