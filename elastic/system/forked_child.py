"""A child that a recipe forks is no part of its run, whatever it inherits from its worker.

It has copies of the worker's loop, handlers and exit functions, and shares the worker's sockets,
control page and log. Each of these asks here whether its process is the worker's own. Children of
`multiprocessing` run no exit functions, and those of `subprocess` share no objects, but both may
receive signals before they have handlers of their own.

It does not know what the recipe itself shares with its children. Those keep the sockets of the
worker's groups open; the fork server kills them with the worker, so that its peers see its end.
"""

import atexit
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

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
    """End this process without finalizing what other threads use, of which a child has none."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # the script has closed it, or its reader
            stream.flush()
    os._exit(code)
