"""Each version of the group is one file, linked into place whole, so one writer wins it.

state-<version>.json   the newest number counts; the newest 16 are kept
beats/<node>           the text of one node
.elastic-<unique>      being written; after an hour every node may remove it

On a full disk, a new version takes the room of an older one, which is removed, and heartbeats need
none, so that the group goes on: each is written over the one before. A part of one is none.

It needs a file system with hard links and atomic renames that all nodes share. A network file
system may show old listings for seconds, and opening a file by its name asks the server. A version
that was written survives a power cut, but on a disk that answers fsync without doing it: there the
group may be damaged, which its reader says.
"""

import contextlib
import os
import re
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from elastic.errors import UsageError
from elastic.rendezvous.backends.backend import VALUE_LIMIT_BYTES, BackendFailed, generation_of
from elastic.system import files

BEATS = "beats"
KEPT_VERSIONS = 16
STALE_AFTER_S = 3600.0

_STATE = re.compile(r"state-([0-9]{1,18})\.json")
_DRAFT = ".elastic-"
# A draft, or of an id that addresses.new_node_id made: files of others may lie beside them.
_OWN = re.compile(r"\.elastic-.+|.+-[0-9]+-[0-9a-f]{8}")
_TEXT_LIMIT_BYTES = 16384


class DirectoryBackend:
    def __init__(self, path: Path) -> None:
        """Raises UsageError unless `path` is or becomes a folder that this process may write."""
        self._path = path
        self._newest = 0, b""  # version and value
        self._prepare()

    def read(self) -> tuple[int, bytes] | None:
        with self._failures("read the group's state"):
            version = max(self._versions(), default=0)
            if self._newest[0] < version or not self._is_kept(version):
                # The file can be missing only if 16 newer ones were written since the listing.
                self._newest = version, files.read_regular(self._state(version), VALUE_LIMIT_BYTES)
            return self._newest if self._newest[0] else None

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        with self._failures("write the group's state"):
            successor = (version or 0) + 1
            newest = max(self._newest[0], *self._versions(), 0)
            if newest != successor - 1 or not self._link(self._state(successor), value):
                return False
            versions = self._versions()
            for old in sorted(versions)[:-KEPT_VERSIONS]:
                self._state(old).unlink(missing_ok=True)
            # A process may sleep between the listing above and the link. If newer versions are
            # written meanwhile, the file of `successor` may be deleted as too old, and the sleeper
            # then creates it a second time. So where there is a newer one the outcome is unknown.
            return max(versions, default=successor) == successor

    def show(self, node_id: str, text: str) -> None:
        with self._failures("write a heartbeat"):
            target, data = self._path / BEATS / _quoted(node_id), text.encode()
            try:
                files.overwrite(target, data)
            except FileNotFoundError:
                files.make_folders(target.parent)
                files.overwrite(target, data)

    def shown(self, node_ids: Collection[str] | None = None) -> dict[str, str]:
        folder, found = self._path / BEATS, {}
        with self._failures("read heartbeats"):
            listed = [each.name for each in files.listing(folder)] if node_ids is None else []
            for name in (*listed, *map(_quoted, node_ids or ())):
                with contextlib.suppress(FileNotFoundError, files.NotRegularFile):
                    data = files.read_regular(folder / name, _TEXT_LIMIT_BYTES)
                    found[unquote(name)] = data.decode(errors="replace")
        return found

    def _prepare(self) -> None:
        probe = self._draft()
        try:
            files.make_folders(self._path)
            files.create_whole(probe, b"", fsync=False, draft=self._draft())
            self._remove_stale(probe.stat().st_mtime)
        except files.NoHardLinks as error:
            raise UsageError(
                f"the rendezvous folder should be on a file system with hard links, but {self._path} has none"
                f" ({error.strerror}); choose another with --rdzv-endpoint or --run-dir, or meet elsewhere with --rdzv-backend"
            ) from error
        except OSError as error:
            if error.errno not in files.FULL:  # a group that is there may find room, as below
                raise UsageError(
                    f"the rendezvous folder should be a folder that this user may write, but {self._path} is not"
                    f" ({error.strerror}); choose another with --run-dir or --rdzv-endpoint, or change its owner"
                ) from error
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    def _remove_stale(self, now_s: float) -> None:
        """Remove files of dead processes. An age is a difference of the file system's own times.

        The node may only have slept. Then its next heartbeat creates the file again, and a state
        that it was about to link is just not set.
        """
        drafts = [path for path in files.listing(self._path) if path.name.startswith(_DRAFT)]
        for path in (*drafts, *files.listing(self._path / BEATS)):
            with contextlib.suppress(FileNotFoundError):
                if _OWN.fullmatch(path.name) and now_s - path.lstat().st_mtime > STALE_AFTER_S:
                    path.unlink()

    def _is_kept(self, listed: int) -> bool:
        """Whether the version that this process knows as the newest counts on.

        A version once seen is never unseen. A network file system may show an old listing. Or a
        person emptied the folder under a live group: then it is put back, so that a node that
        starts finds the group. But where others have begun the folder again without this process,
        and reached a later generation, theirs counts.
        """
        version, value = self._newest
        if version > listed:
            if listed:
                there = files.read_regular(self._state(listed), VALUE_LIMIT_BYTES)
                if generation_of(there) > generation_of(value):
                    self._newest = 0, b""
                    return False
            self._link(self._state(version), value)
        return True

    def _state(self, version: int) -> Path:
        return self._path / f"state-{version:012d}.json"

    def _versions(self) -> list[int]:
        names: list[str] = []  # without `listing`, which sorts paths: polls are many
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self._path)  # noqa: PTH208
        if not names:
            files.make_folders(self._path)  # a person may have removed it under a live group
        return [int(match[1]) for name in names if (match := _STATE.fullmatch(name))]

    def _link(self, target: Path, value: bytes) -> bool:
        """Create `target` with this content, whole; False if it exists."""
        while True:
            try:
                return files.create_whole(target, value, fsync=True, draft=self._draft())
            except FileNotFoundError:
                return False
            except OSError as error:
                if error.errno not in files.FULL or not self._remove_oldest():
                    raise

    def _remove_oldest(self) -> bool:
        """Take the room of the oldest version, if there is one before the newest.

        One after another, so that no other file takes room that is not needed yet.
        """
        older = sorted(self._versions())[:-1]
        if older:
            self._state(older[0]).unlink(missing_ok=True)
        return bool(older)

    def _draft(self) -> Path:
        return self._path / f"{_DRAFT}{uuid.uuid4().hex}"

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BackendFailed(
                # Without the file's name, which differs each time: an equal message is not
                # repeated.
                f"could not {what} in {self._path}: {error.strerror or error}; trying again at the next poll"
            ) from error


def _quoted(node_id: str) -> str:
    return quote(node_id, safe="")
