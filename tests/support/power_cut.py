"""File operations are recorded, and each prefix of them becomes the files that a power cut leaves.

After ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). Of a file, only
what was synced survives for certain, and of a folder, only the names that were there at its last
sync; later changes of names may survive one without the other, in any order. A rename is one
change.

The recorder watches functions of `os` in this process. That it misses nothing is checked: all
changes together must give the files that are there.
"""

import io
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = 0  # the number of the recorded folder; each file and folder has one


@dataclass(frozen=True, slots=True)
class Change:
    """`content`: what a file has from here on. `names`: (folder, name, file or None) changes
    together. `synced`: a file or folder. `mark`: what the recorded program told.
    """

    node: int | None = None
    content: bytes = b""
    names: tuple[tuple[int, str, int | None], ...] = ()
    synced: int | None = None
    mark: Any = None


WATCHED = (
    *("open", "write", "ftruncate", "truncate", "mkdir", "link", "rename", "replace"),
    *("unlink", "remove", "rmdir", "fsync"),
)


class Recorder:
    """`changes` of the files below a folder, which is empty at first: compared after each call."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.changes: list[Change] = []
        self._root = root
        self._count = itertools.count(ROOT)
        self._nodes = {root.stat().st_ino: next(self._count)}
        self._contents: dict[int, bytes] = {}
        self._names: dict[tuple[int, str], int] = {}
        for name in WATCHED:
            patch.setattr(os, name, self._watched(name, getattr(os, name)))
        patch.setattr(io, "open", self._watched("open", io.open))

    def mark(self, value: Any) -> None:
        self.changes.append(Change(mark=value))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            self._look()
            about = os.fstat(arguments[0]) if name == "fsync" else None
            if about is not None and about.st_dev == self._root.stat().st_dev:
                self.changes.append(Change(synced=self._nodes.get(about.st_ino)))
            return result

        return watched

    def _look(self) -> None:
        # The number of a file that is gone may be given to a new one.
        known, self._nodes = self._nodes, {self._root.stat().st_ino: ROOT}
        names: dict[tuple[int, str], int] = {}
        for folder, folders, files in os.walk(self._root):
            parent = self._nodes[Path(folder).stat().st_ino]
            for name in folders + files:
                path = Path(folder, name)
                inode = path.lstat().st_ino
                if inode not in self._nodes:
                    self._nodes[inode] = known.get(inode) or next(self._count)
                node = names[parent, name] = self._nodes[inode]
                if name in files:
                    with io.FileIO(path) as file:  # the one opening that is not watched
                        content = file.read()
                    if self._contents.get(node) != content:
                        self._contents[node] = content
                        self.changes.append(Change(node=node, content=content))
        gone = [(*place, None) for place in self._names.keys() - names.keys()]
        new = [(*place, node) for place, node in names.items() if self._names.get(place) != node]
        self._names = names
        if gone or new:
            self.changes.append(Change(names=(*gone, *new)))


@dataclass
class _Disk:
    """What a prefix of the changes has made."""

    contents: dict[int, bytes] = field(default_factory=dict)
    synced_contents: dict[int, bytes] = field(default_factory=dict)
    units: list[tuple[tuple[int, str, int | None], ...]] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # units that no sync has made durable

    def apply(self, change: Change) -> None:
        if change.node is not None:
            self.contents[change.node] = change.content
        if change.names:
            self.pending.append(len(self.units))
            self.units.append(change.names)
        if change.synced is not None:
            self.synced_contents[change.synced] = self.contents.get(change.synced, b"")
            self.pending = [
                each
                for each in self.pending
                if all(where != change.synced for where, _, _ in self.units[each])
            ]

    def tree(self, lost: frozenset[int], content: Callable[[int], bytes]) -> dict[str, bytes | None]:
        """Path to content, None for a folder, without the changes of names that were lost."""
        folders: dict[int, dict[str, int]] = {}
        for number, unit in enumerate(self.units):
            if number not in lost:
                for where, name, node in unit:
                    names = folders.setdefault(where, {})
                    names.pop(name, None)
                    if node is not None:
                        names[name] = node

        def below(folder: int, prefix: str) -> Iterator[tuple[str, bytes | None]]:
            for name, node in folders.get(folder, {}).items():
                if node in self.contents:
                    yield prefix + name, content(node)
                else:
                    yield prefix + name, None
                    yield from below(node, f"{prefix}{name}/")

        return dict(below(ROOT, ""))

    def torn(self, node: int) -> bytes:
        """Half of what was appended since the last sync."""
        synced, now = self.synced_contents.get(node, b""), self.contents[node]
        if not now.startswith(synced):
            return synced
        return now[: len(synced) + (len(now) - len(synced)) // 2]

    def trees(self) -> Iterator[dict[str, bytes | None]]:
        """Every way in which the power may go off here, bounded: the changes of names that are not
        durable are lost all, none, all but one, or one alone.
        """
        pending = frozenset(self.pending)
        synced = lambda node: self.synced_contents.get(node, b"")  # noqa: E731
        yield self.tree(frozenset(), self.contents.__getitem__)
        yield self.tree(frozenset(), synced)
        yield self.tree(frozenset(), self.torn)
        yield self.tree(pending, synced)
        for each in pending:
            yield self.tree(pending - {each}, synced)
            yield self.tree(frozenset({each}), synced)


def cuts(changes: list[Change]) -> Iterator[tuple[dict[str, bytes | None], list[Any]]]:
    """(the files that a power cut leaves, the marks before it), each tree once, with the most."""
    disk, marks, found = _Disk(), list[Any](), {}
    for change in [Change(), *changes]:
        disk.apply(change)
        marks += [change.mark] if change.mark is not None else []
        for tree in disk.trees():
            found[repr(sorted(tree.items()))] = tree, list(marks)
    yield from found.values()


def write_tree(tree: dict[str, bytes | None], root: Path) -> None:
    for name, content in tree.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


def read_tree(root: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


def last_tree(changes: list[Change]) -> dict[str, bytes | None]:
    """With all that was written."""
    disk = _Disk()
    for change in changes:
        disk.apply(change)
    return disk.tree(frozenset(), disk.contents.__getitem__)
