"""Heartbeats in a folder: one file per node, which is opened only where a look at it shows nothing.

beats/<node>   the counter of one node, replaced whole at each heartbeat

A replaced file has another inode and time of change. One listing shows both for all nodes, and a
node whose file has changed has sent a heartbeat. A network file system may show old attributes for
seconds, and old listings for longer; to open a file by its name asks the server. So a file that has
not changed at two looks in a row is opened, and its counter decides.

It does not promise that a value counts every heartbeat: it only changes whenever one was seen.
"""

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from elastic.system.files import NotRegularFile, read_regular
from elastic.system.untrusted import parse_number

FOLDER = "beats"
# Beyond so many nodes one listing is cheaper than to ask for each by its name.
LISTED_FROM = 16
UNCHANGED_LOOKS = 2
_LIMIT_BYTES = 64


@dataclass(slots=True, kw_only=True)
class _Seen:
    """`value` is what `BeatFiles.read` returns. `counter`: what the file holds, None: not known."""

    value: int
    counter: int | None
    mark: tuple[int, int]
    unchanged: int = 0


class BeatFiles:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[str, _Seen] = {}  # by the file's name

    def file(self, node_id: str) -> Path:
        return self.path / quote(node_id, safe="")

    def read(self, node_ids: Collection[str] | None) -> dict[str, int]:
        """A number for each of these nodes, None: of all that have a file. Raises OSError."""
        found = {}
        for path, status in self._statuses(node_ids):
            if stat.S_ISREG(status.st_mode):
                with contextlib.suppress(FileNotFoundError, NotRegularFile):
                    value = self._value(path, (status.st_ino, status.st_mtime_ns))
                    if value is not None:
                        found[unquote(path.name)] = value
        return found

    def _statuses(self, node_ids: Collection[str] | None) -> Iterator[tuple[Path, os.stat_result]]:
        if node_ids is not None and len(node_ids) <= LISTED_FROM:
            for path in map(self.file, node_ids):
                with contextlib.suppress(FileNotFoundError):
                    yield path, path.lstat()
            return
        wanted = None if node_ids is None else {quote(node_id, safe="") for node_id in node_ids}
        for entry in self._entries():
            if wanted is None or entry.name in wanted:
                with contextlib.suppress(FileNotFoundError):
                    yield self.path / entry.name, entry.stat(follow_symlinks=False)

    def _entries(self) -> Iterable["os.DirEntry[str]"]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            return list(entries)
        return ()

    def _value(self, path: Path, mark: tuple[int, int]) -> int | None:
        seen = self._seen.get(path.name)
        if seen is not None and mark != seen.mark:
            # Its present content counts already, also if it is read only later.
            seen.mark, seen.counter, seen.unchanged = mark, None, 0
            seen.value += 1
            return seen.value
        if seen is not None:
            seen.unchanged += 1
            if seen.unchanged < UNCHANGED_LOOKS:
                return seen.value
        counter = parse_number(read_regular(path, _LIMIT_BYTES))
        if counter is None:
            return None if seen is None else seen.value
        if seen is None:
            self._seen[path.name] = _Seen(value=counter, counter=counter, mark=mark)
            return counter
        seen.value += seen.counter not in (None, counter)
        seen.counter = counter
        return seen.value
