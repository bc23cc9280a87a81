"""The metrics of a run are in the file of the newest generation that began one.

.metrics-<generation>.jsonl   created whole, exclusively, by rank 0 of the generation; its lines are
                              appended under this name alone
metrics.jsonl                 a second name of the newest of them

A process may be frozen before any system call, and wake up when a newer generation trains. Then it
may still give the name `metrics.jsonl` to its own, older file, and can do no more harm: the newer
file keeps a name that no older process uses, and readers of this library take that one. The process
that woke up, and each writer with its next line, puts `metrics.jsonl` right.

It does not promise that others who open `metrics.jsonl` find the newest file in between; nor, where
both processes are dead by then, before the next resume. A link and its file are in one folder,
because some file systems have hard links within a folder only.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elastic.errors import Fenced
from elastic.system.files import create_whole, link_over, listing, make_folders
from elastic.system.untrusted import parse_number

_TRIES = 10  # a newer generation begins in each


def own_file(path: Path, generation: int) -> Path:
    """path: `metrics.jsonl`, here and below."""
    return path.with_name(f".{path.stem}-{generation:06d}{path.suffix}")


def generation_of(file: Path) -> int:
    """0 for `path` itself, and for any other file."""
    is_own = file.name.startswith(".") and file.stem.count("-") == 1
    return (is_own and parse_number(file.stem.partition("-")[2])) or 0


def newest_file(path: Path) -> Path:
    """`path` itself where no generation has a file of its own: in a run of an earlier version."""
    files = _files(path)
    with suppress(FileNotFoundError):
        named = path.lstat()
        # A network file system shows listings that are older than what a name stands for.
        if named.st_nlink > 1 and not any(os.path.samestat(named, each) for each in files.values()):
            return path
    return max(files, key=generation_of, default=path)


def newest_generation(path: Path) -> int:
    """0 for none. Raises OSError."""
    return max(map(generation_of, _files(path)), default=0)


def begin(path: Path, generation: int, data: bytes) -> None:
    """Create the generation's file, which `path` does not name yet. Raises Fenced, or OSError."""
    make_folders(path.parent)
    if not create_whole(own_file(path, generation), data, fsync=True):
        raise _fenced(path, generation)


def check_newest(path: Path, generation: int) -> None:
    """Raises Fenced where a newer generation has begun."""
    if newest_generation(path) > generation:
        raise _fenced(path, generation)


def is_shown(path: Path, file: Path) -> bool:
    """Whether `path` names this file, if the file is there and does not wait for room."""
    try:
        about = file.lstat()
    except FileNotFoundError:
        return True
    try:
        return os.path.samestat(about, path.lstat())
    except FileNotFoundError:
        return False


def show(path: Path) -> None:
    """Have `path` name the newest file. Raises OSError."""
    for _ in range(_TRIES):
        newest = max(_files(path), key=generation_of, default=path)
        if is_shown(path, newest):
            return
        # This process may sleep before the rename; the next look tells.
        with suppress(FileNotFoundError):  # it was removed, because there are newer ones
            link_over(newest, path)


def older(path: Path, than: Path) -> list[Path]:
    """The files of generations before that of `than`, the newest first."""
    files = (file for file in _files(path) if generation_of(file) < generation_of(than))
    return sorted(files, key=generation_of, reverse=True)


def remove_older(path: Path, than: Path, keeps: Callable[[Path], bool]) -> None:
    """Remove the files of generations before that of `than`, but those that it keeps, because they
    have lines of steps that no newer file has yet. Raises OSError.
    """
    for file in older(path, than):
        if not keeps(file):
            file.unlink(missing_ok=True)


def _files(path: Path) -> dict[Path, os.stat_result]:
    """Those of generations. A file that vanishes meanwhile is left out. Raises OSError."""
    found = {}
    for file in listing(path.parent):
        if file.name.startswith(f".{path.stem}-") and file.suffix == path.suffix and generation_of(file):
            with suppress(FileNotFoundError):
                found[file] = file.lstat()
    return found


def _fenced(path: Path, generation: int) -> Fenced:
    return Fenced(
        f"expected no metrics of generation {generation} or a newer one beside {path}, found those"
        f" of generation {newest_generation(path)}: this process is left over from an older generation"
    )
