"""A signal that asks for a stop kills none of the processes that an agent has started.

A scheduler may signal every process of a job. The agent decides what a signal means; the processes
that it starts ignore it, because the step under way still needs them. What they ignore is up to
each: a worker has a handler for SIGTERM, and a recipe may have one for a warning.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

END = (signal.SIGTERM, signal.SIGINT)
# What schedulers send ahead of a time limit or a preemption, and terminals when they close.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
ALL = (*END, *WARNINGS)


@contextmanager
def blocked() -> Iterator[None]:
    """Around the start of a process, which inherits it: none of them ends that process before it
    has said what it does with them. It then calls `unblock`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ALL)


def ignore() -> None:
    """From here on, in a process that leaves when its owner does."""
    for number in ALL:
        signal.signal(number, signal.SIG_IGN)
    unblock()


def ignore_warnings() -> None:
    """From here on, in a worker. A handler that is there already, as of a package, stays."""
    for number in WARNINGS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
