"""What this process prints at its end cannot change how it ends.

A terminal may have been closed, which is what SIGHUP says, and the reader of a pipe may be gone.
"""

import os
from pathlib import Path
from typing import TextIO


def print_if_read(*lines: str, file: TextIO) -> None:
    """Print the lines, or drop them if nothing takes them."""
    for line in lines:
        drop_unread(file, f"{line}\n")


def drop_unread(file: TextIO, text: str = "") -> None:
    """Write a text, and what waits in the buffer; if nothing takes it, no later flush fails."""
    try:
        file.write(text)
        file.flush()
    except OSError:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), file.fileno())
