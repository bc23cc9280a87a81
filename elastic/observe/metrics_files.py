"""The metrics of a run are in the file of the newest generation that began one.

.metrics-<generation>.jsonl   created whole, exclusively, by rank 0 of the generation; its lines are
                              appended under this name alone
metrics.jsonl                 a second name of the newest of them

A process may be frozen before any system call, and wake up when a newer generation trains. Then it
may still give the name `metrics.jsonl` to its own, older file, and can do no more harm: the newer
file keeps a name that no older process uses, and readers of this library take that one. The process
that woke up, and each writer with its next `sync`, puts `metrics.jsonl` right.

It does not promise that others who open `metrics.jsonl` find the newest file in between; nor, where
both processes are dead by then, before the next resume. A link and its file are in one folder,
because some file systems have hard links within a folder only.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from elastic.errors import Fenced
from elastic.system.files import link_over, listing

_TRIES = 10  # a newer generation begins in each


def own_file(path: Path, generation: int) -> Path:
    """path: `metrics.jsonl`, here and below."""
    return path.with_name(f".{path.stem}-{generation:06d}{path.suffix}")


def files(path: Path) -> dict[int, Path]:
    """Those of generations, in their order. Raises OSError."""
    name = re.compile(rf"\.{re.escape(path.stem)}-(\d{{6,18}}){re.escape(path.suffix)}")
    found = {int(match[1]): file for file in listing(path.parent) if (match := name.fullmatch(file.name))}
    return dict(sorted(found.items()))


def newest_file(path: Path) -> Path:
    """`path` itself where no generation has a file of its own. Raises OSError."""
    own = files(path).values()
    with suppress(FileNotFoundError):
        named = path.lstat()
        # A network file system shows listings that are older than what a name stands for.
        if named.st_nlink > 1 and not any(_is_one_file(named, each) for each in own):
            return path
    return next(reversed(own), path)


def newest_generation(path: Path) -> int:
    """0 for none. Raises OSError."""
    return max(files(path), default=0)


def check_newest(path: Path, generation: int) -> None:
    """Raises Fenced where a newer generation has begun."""
    if (newest := newest_generation(path)) > generation:
        raise Fenced(
            f"expected no metrics of a newer generation than {generation} beside {path}, found those"
            f" of generation {newest}: this process is left over from an older generation"
        )


def show(path: Path) -> None:
    """Have `path` name the newest file. Raises OSError."""
    for _ in range(_TRIES):
        newest = next(reversed(files(path).values()), path)
        # It was removed, because there are newer ones, or waits for room.
        with suppress(FileNotFoundError):
            if _is_one_file(newest.lstat(), path):
                return
            # This process may sleep before the rename; the next look tells.
            link_over(newest, path)


def _is_one_file(about: os.stat_result, path: Path) -> bool:
    """False where `path` names nothing."""
    try:
        return os.path.samestat(about, path.lstat())
    except FileNotFoundError:
        return False
