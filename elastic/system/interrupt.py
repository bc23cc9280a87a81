"""As long as there is nothing to tidy up, Ctrl-C ends the command at once, with one line.

A KeyboardInterrupt in the middle of an import shows the frames of the import, or is lost: libraries
catch what their optional parts raise. Nothing can be done for the first moment of the interpreter,
before it has read this file.
"""

import os
import signal
from typing import NoReturn

EXIT_CTRL_C = 130  # what a shell reports for a program that SIGINT ended
SENTENCE = "elastic-train: interrupted before it trained anything; nothing is lost"


def end_at_once() -> None:
    """From here on; unless this process ignores Ctrl-C, as a shell's background jobs do."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def raise_from_here() -> None:
    """There will be something to tidy up: Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def hold() -> None:
    """Ctrl-C waits for `end_at_once`, also across an exec."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _end(_number: int, _frame: object) -> NoReturn:
    os.write(2, f"{SENTENCE}\n".encode())
    os._exit(EXIT_CTRL_C)
