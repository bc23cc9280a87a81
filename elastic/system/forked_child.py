"""A child that a recipe forks is no part of its run, whatever it inherits from its worker.

It has copies of the worker's loop, handlers and exit functions, and shares the worker's sockets,
control page and log. Each of these asks here whether its process is the worker's own. Children of
`multiprocessing` run no exit functions, and those of `subprocess` share no objects, but both may
receive signals before they have handlers of their own.

It does not know what the recipe itself shares with its children.

The kernel ends a connection when its last owner is gone. A child would own those of the libraries
too, and so would a program that it starts: peers would wait for a process that left long ago. So a
child gives up the sockets of `closing_with_this_process` as soon as it is forked, and no program
gets them; but for a child that C code forks and that goes on without another program.
"""

import atexit
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

_Identity = tuple[int, int]  # device and inode

_own: dict[int, _Identity] = {}  # sockets, by descriptor
_pids: list[int] = []  # of the process that runs the recipe, at most one


def begin() -> None:
    """Call it in the process that runs the recipe, or that calls elastic.start: it is no child."""
    _pids[:] = [os.getpid()]


def is_one() -> bool:
    """Whether this process was forked since `begin`. False where nothing has begun."""
    return bool(_pids) and os.getpid() not in _pids


def at_own_exit(function: Callable[[], object]) -> None:
    """As atexit.register, and not at the exit of a child, which would end what its parent uses."""
    atexit.register(lambda: None if is_one() else function())


def handle_signal(number: signal.Signals, handler: Callable[[int, FrameType | None], object]) -> None:
    """As signal.signal; a child gets back the handler that was there before.

    A child would otherwise be deaf: `multiprocessing` ends its daemons by SIGTERM, and waits.
    """
    before = signal.signal(number, handler)
    masks: list[set[int]] = []

    # Python drops what a child receives while it is being forked, so that comes afterwards.
    def hold() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [number]))

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def give_back() -> None:
        if signal.getsignal(number) is handler:
            signal.signal(number, signal.SIG_DFL if before is None else before)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=give_back)


def end(code: int) -> NoReturn:
    """End a child without finalizing what its parent's threads use; it has copies without them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
    """None for anything but an open socket."""
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
