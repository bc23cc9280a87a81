"""What this process prints at its end cannot change how it ends.

A terminal may have been closed, which is what SIGHUP says, and the reader of a pipe may be gone.
"""

import os
import sys
from pathlib import Path
from typing import TextIO


def open_closed_streams() -> None:
    """A command whose output is closed (`>&-`) trains as any other."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, number)
            setattr(sys, name, os.fdopen(number, "w"))


def print_if_read(*lines: str, file: TextIO) -> None:
    """Print the lines, and what waits in the buffer; if nothing takes it, no later flush fails."""
    try:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
    except OSError:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), file.fileno())
