"""A file that a command writes is none of a run's own, of whichever run.

It does not promise that the file can be written.
"""

import os
from pathlib import Path

from elastic.config.identity import NAME
from elastic.config.run_dir import OWN_NAMES, OWN_PREFIX, UID
from elastic.errors import UsageError


def refuse_own(path: Path) -> None:
    """Raises UsageError for a name that a run has for its own files, also through links."""
    resolved = Path(os.path.realpath(path))
    for folder in resolved.parents:
        first = resolved.relative_to(folder).parts[0]
        is_own = first in OWN_NAMES or first.startswith(OWN_PREFIX)
        if is_own and _is_run(folder):
            raise UsageError(
                f"expected a FILE that is not a run's own, found {path} below {folder}, where {first} is; take another name"
            )


def _is_run(folder: Path) -> bool:
    """The local copies of a run at a URL, and a run of a script without the library, have `uid`
    alone.
    """
    return any(os.path.exists(folder / name) for name in (NAME, UID))  # noqa: PTH110 - Path.exists may raise
