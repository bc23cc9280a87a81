"""The sockets of a library close with the process that opened them, whatever children it has.

The kernel ends a connection when its last owner is gone. A child that a recipe forks would own it
too, and so would a program that it starts: peers would then wait for a process that left long ago.
So a child gives up these sockets as soon as it is forked, and no program gets them.

It does not reach a child that C code forks and that goes on without another program.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_Identity = tuple[int, int]  # device and inode

_own: dict[int, _Identity] = {}  # by descriptor


@contextmanager
def closing_with_this_process() -> Iterator[None]:
    """Sockets that any thread opens within it are this process's alone."""
    before = _sockets()
    try:
        yield
    finally:
        for descriptor, identity in _sockets().items():
            if before.get(descriptor) != identity:
                os.set_inheritable(descriptor, False)
                _own[descriptor] = identity


def _sockets() -> dict[int, _Identity]:
    descriptors = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    return {each: identity for each in descriptors if (identity := _identity(each)) is not None}


def _identity(descriptor: int) -> _Identity | None:
    """None for what is no socket, or no longer open."""
    with suppress(OSError):
        found = os.fstat(descriptor)
        if stat.S_ISSOCK(found.st_mode):
            return found.st_dev, found.st_ino
    return None


def _give_up() -> None:
    """In a child. The numbers stay in use: its copies of the library's objects still have them."""
    with suppress(OSError):  # no descriptor is left
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor, identity in _own.items():
            if _identity(descriptor) == identity:
                os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
    _own.clear()


os.register_at_fork(after_in_child=_give_up)
