"""A signal ends a command with a fixed code, and what is printed at the end cannot change a code.

While there is nothing to tidy up, Ctrl-C ends it at once, with one line. SIGTERM, and each signal
of --drain-signals, does the same to a command that trains, which then ends as an interrupted one:
the signal's sender, such as a scheduler, gives the command again.

A KeyboardInterrupt in the middle of an import shows the frames of the import, or is lost: libraries
catch what their optional parts raise. Nothing can be done for the first moment of the interpreter,
before it has read this file.

At the end of a command its terminal may have been closed, which is what SIGHUP says, and the reader
of a pipe may be gone: output that nothing takes is dropped.
"""

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, TextIO

from elastic.errors import EXIT_INTERRUPTED
from elastic.system import stop_signals

EXIT_CTRL_C = 130  # what a shell reports for a program that SIGINT ended
SENTENCE = "elastic-train: interrupted; nothing is lost"


class Terminated(KeyboardInterrupt):
    """SIGTERM, or a warning of it, where Ctrl-C raises KeyboardInterrupt."""


def end_at_once() -> None:
    """On Ctrl-C from now on; unless this process ignores it, as a shell's background jobs do."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_at_once_by(numbers: Iterable[signal.Signals]) -> None:
    """Also on these signals, unless ignored, as SIGHUP is under `nohup`."""
    for number in numbers:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    stop_signals.unblock()


def raise_from_here(*, is_second_final: bool = False) -> None:
    """From now on, since something is to be tidied up: a signal raises KeyboardInterrupt or
    Terminated, once. is_second_final: another one ends the process; else nothing interrupts that.
    """
    for number in stop_signals.ALL:
        if signal.getsignal(number) is _end:
            signal.signal(number, partial(_raise, _end if is_second_final else signal.SIG_IGN))


def code_of(raised: KeyboardInterrupt) -> int:
    return EXIT_INTERRUPTED if isinstance(raised, Terminated) else EXIT_CTRL_C


def _raise(then: Any, number: int, _frame: object) -> NoReturn:
    for each in stop_signals.ALL:
        signal.signal(each, then)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _end(number: int, _frame: object) -> NoReturn:
    with suppress(OSError):  # SIGHUP says that the terminal is closed
        os.write(2, f"{SENTENCE}\n".encode())
    os._exit(EXIT_CTRL_C if number == signal.SIGINT else EXIT_INTERRUPTED)


def open_closed_streams() -> None:
    """A command whose output is closed (`>&-`) trains as any other, and prints as any other what
    the locale cannot write.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w"))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_if_read(*lines: str, file: TextIO) -> None:
    """Print the lines, and what waits in the buffer; if nothing takes it, no later flush fails."""
    try:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
    except OSError:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), file.fileno())
