"""File operations are recorded, and each prefix of them becomes the files that a power cut leaves.

After ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). Of a file, only
what was synced survives for certain, and of a folder, only the names that were there at its last
sync; later changes of names may survive one without the other, in any order. A rename is one
change.

The recorder replaces functions of `os` in this process. That it misses nothing is checked: all
operations together must give the files that are there.
"""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class Recorder:
    """`changes` of the files below a folder, which is empty at first."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.changes: list[Change] = []
        self._root = root
        self._device = root.stat().st_dev
        self._nodes = {root.stat().st_ino: ROOT}
        self._contents: dict[int, bytes] = {}
        self._last = ROOT
        self._names: dict[tuple[int, str], int | None] = {}
        after: dict[str, Callable[..., None]] = {
            **dict.fromkeys(
                ("write", "ftruncate", "truncate"), lambda _, where, *_rest: self._changed(where)
            ),
            **dict.fromkeys(("unlink", "remove", "rmdir"), self._after_unlink),
            "open": self._after_open,
            "fsync": self._after_fsync,
            "link": self._after_link,
            "mkdir": self._after_mkdir,
        }
        for name, then in after.items():
            patch.setattr(os, name, self._wrapped(getattr(os, name), then))
        for name in ("rename", "replace"):
            patch.setattr(os, name, self._renamed(getattr(os, name)))
        patch.setattr(io, "open", self._wrapped(io.open, self._after_open))

    def mark(self, value: Any) -> None:
        self.changes.append(Change(mark=value))

    def _wrapped(self, call: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            after(result, *arguments)
            return result

        return recorded

    def _renamed(self, call: Callable[..., None]) -> Callable[..., None]:
        def recorded(source: Any, target: Any) -> None:
            node = self._node_of(source)
            call(source, target)
            if node is not None:
                self._name((*self._place(source), None), (*self._place(target), node))

        return recorded

    def _after_open(self, _result: Any, path: Any, *_: Any) -> None:
        if not isinstance(path, int) and self._is_inside(path) and not Path(path).is_dir():
            self._see(path)

    def _after_fsync(self, _result: None, fd: int) -> None:
        if (node := self._known(fd)) is not None:
            self.changes.append(Change(synced=node))

    def _after_link(self, _result: None, source: Any, target: Any) -> None:
        if (node := self._node_of(source)) is not None:
            self._name((*self._place(target), node))

    def _after_unlink(self, _result: None, path: Any) -> None:
        if self._is_inside(path):
            self._name((*self._place(path), None))

    def _after_mkdir(self, _result: None, path: Any, *_: Any) -> None:
        if self._is_inside(path):
            self._see(path)

    def _see(self, path: Any) -> None:
        """A file or folder that an open or mkdir may have made."""
        about = os.lstat(path)
        folder, name = self._place(path)
        node = self._nodes.get(about.st_ino)
        # The number of a file that is gone may be given to a new one.
        if node is None or self._names.get((folder, name)) != node:
            self._last += 1
            node = self._nodes[about.st_ino] = self._last
            self._name((folder, name, node))
        self._changed(path)

    def _changed(self, where: Any) -> None:
        node = self._known(where)
        if node is None or node == ROOT:
            return
        path = Path(f"/proc/self/fd/{where}" if isinstance(where, int) else where)
        if not path.is_dir():
            with _raw(path) as file:
                content = file.read()
            if self._contents.get(node) != content:
                self._contents[node] = content
                self.changes.append(Change(node=node, content=content))

    def _name(self, *names: tuple[int, str, int | None]) -> None:
        self._names.update({(folder, name): node for folder, name, node in names})
        self.changes.append(Change(names=names))

    def _place(self, path: Any) -> tuple[int, str]:
        path = Path(path).absolute()
        return self._nodes[path.parent.stat().st_ino], path.name

    def _node_of(self, path: Any) -> int | None:
        return self._nodes[os.lstat(path).st_ino] if self._is_inside(path) else None

    def _known(self, where: Any) -> int | None:
        about = os.stat(where)  # noqa: PTH116 - also of a descriptor
        return self._nodes.get(about.st_ino) if about.st_dev == self._device else None

    def _is_inside(self, path: Any) -> bool:
        return Path(path).absolute().is_relative_to(self._root)


_raw = io.FileIO  # opens without the functions that are replaced


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


@contextmanager
def recording(root: Path) -> Iterator[Recorder]:
    with pytest.MonkeyPatch.context() as patch:
        yield Recorder(root, patch)
