"""What a run was begun with, as its `run.json` says; None where there is no such file."""

from contextlib import suppress

from elastic.config import identity
from elastic.config.identity import Identity
from elastic.config.parent import Parent
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.storage.store import SMALL_LIMIT_BYTES
from elastic.system.files import open_regular


def parent_of(run: RunDir) -> Parent | None:
    """The run that this one began from. Raises UsageError, OSError."""
    found = _identity(run, "the report reads there what the run descends from")
    return None if found is None else found.parent


def begun_with(run: RunDir) -> Identity | None:
    """It explains a difference and makes none: what cannot be read is left out."""
    with suppress(UsageError, OSError):
        return _identity(run, "the comparison reads there what the run was begun with")
    return None


def _identity(run: RunDir, remedy: str) -> Identity | None:
    with suppress(FileNotFoundError), open_regular(run.local / identity.NAME, follow=True) as file:
        return identity.parse(file.read(SMALL_LIMIT_BYTES + 1), remedy=remedy)
    return None
