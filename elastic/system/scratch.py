"""A process has a temporary folder of its own, which it removes at its end.

That of a process that is killed stays: it holds a socket and a few small files.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.errors import UsageError


@contextmanager
def scratch_folder(kind: str = "") -> Iterator[Path]:
    """A new folder, which is removed at the end. kind: a word for its name. Raises UsageError."""
    folder = open_scratch(kind)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_scratch(kind: str = "") -> Path:
    """Raises UsageError."""
    try:
        return Path(tempfile.mkdtemp(prefix=f"elastic-{kind}"))
    except OSError as error:
        raise UsageError(
            f"expected to write to a temporary folder, found that it fails ({error}); set TMPDIR to a folder that this user may write"
        ) from error
