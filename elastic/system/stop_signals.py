"""A signal that asks for a stop kills none of the processes that an agent has started; before there
is something to tidy up, it ends the command at once, with one line.

A scheduler may signal every process of a job. The agent decides what a signal means; the processes
that it starts ignore it, because the step under way still needs them. What they ignore is up to
each: a worker has a handler for SIGTERM, and a recipe may have one for a warning.

A command that trains ends as an interrupted one by SIGTERM, and by each signal of --drain-signals:
the signal's sender, such as a scheduler, gives the command again. A KeyboardInterrupt in the middle
of an import shows the frames of the import, or is lost: libraries catch what their optional parts
raise. Nothing can be done for the first moment of the interpreter, before it has read this file.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from elastic.errors import EXIT_INTERRUPTED

END = (signal.SIGTERM, signal.SIGINT)
# What schedulers send ahead of a time limit or a preemption, and terminals when they close.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
ALL = (*END, *WARNINGS)
EXIT_CTRL_C = 130  # what a shell reports for a program that SIGINT ended
SENTENCE = "elastic-train: interrupted before it trained anything; nothing is lost"


@contextmanager
def blocked(numbers: Iterable[signal.Signals] = ALL) -> Iterator[None]:
    """Around the start of a process, which inherits it: none of them ends that process before it
    has said what it does with them. It then calls `unblock`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
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


# A command that has not begun to train.


class Terminated(KeyboardInterrupt):
    """SIGTERM, or a warning of it, where Ctrl-C raises KeyboardInterrupt."""


def end_at_once() -> None:
    """From here on; unless this process ignores Ctrl-C, as a shell's background jobs do."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_at_once_by(numbers: Iterable[signal.Signals]) -> None:
    """From here on, for a command that trains; unless this process ignores the signal, as `nohup`
    has it ignore SIGHUP.
    """
    for number in numbers:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    unblock()


def raise_from_here() -> None:
    """There will be something to tidy up: a signal raises KeyboardInterrupt or Terminated, once."""
    for number in ALL:
        if signal.getsignal(number) is _end:
            signal.signal(number, _raise)


def code_of(raised: KeyboardInterrupt) -> int:
    return EXIT_INTERRUPTED if isinstance(raised, Terminated) else EXIT_CTRL_C


def _raise(number: int, _frame: object) -> NoReturn:
    for each in ALL:  # nothing interrupts the tidying
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _end(number: int, _frame: object) -> NoReturn:
    with suppress(OSError):  # SIGHUP says that the terminal is closed
        os.write(2, f"{SENTENCE}\n".encode())
    os._exit(EXIT_CTRL_C if number == signal.SIGINT else EXIT_INTERRUPTED)
