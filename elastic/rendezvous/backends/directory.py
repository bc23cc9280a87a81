"""Each version of the group is one file, linked into place whole, so one writer wins it.

state-<version>.json   the newest number counts; the newest 16 are kept
beat-<node>            the counter of one node, replaced whole
generation             the newest generation as text, for processes outside the group
.tmp-<unique>          being written; after an hour every node may remove it

It needs a file system with hard links and atomic renames that all nodes share. It does not promise
to survive a power cut: once all agents are gone nothing in it is needed. `generation` may step back
until the next poll if two nodes write it at once. A save of an older generation that this lets
through is a whole checkpoint of the run's one trajectory, and replaces none.
"""

import contextlib
import re
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from elastic.errors import UsageError
from elastic.rendezvous.backends.backend import VALUE_LIMIT_BYTES, BackendFailed
from elastic.system.files import NotRegularFile, create_whole, read_regular, replace_whole
from elastic.system.untrusted import parse_number

KEPT_VERSIONS = 16
STALE_AFTER_S = 3600.0
READ_TRIES = 8

_STATE = re.compile(r"state-([0-9]{1,18})\.json")
_BEAT = "beat-"
_TEMPORARY = ".tmp-"
_NUMBER_LIMIT_BYTES = 64


class DirectoryBackend:
    def __init__(self, path: Path) -> None:
        """Raises UsageError unless `path` is or becomes a folder that this process may write."""
        self._path = path
        self._lock = threading.Lock()
        self._counters: dict[str, int] = {}
        self._newest = 0, b""  # version and value
        probe = self._draft()
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe.touch()
            now_s = probe.stat().st_mtime
            probe.unlink()
            self._remove_stale(now_s)
        except OSError as error:
            raise UsageError(
                f"the rendezvous folder should be a folder that this user may write, but {path} is not"
                f" ({error.strerror}); choose another with --run-dir or --rdzv-endpoint, or change its owner"
            ) from error

    def read(self) -> tuple[int, bytes] | None:
        with self._failures("read the group's state"):
            for _ in range(READ_TRIES):
                version = max(self._versions(), default=0)
                if self._newest[0] >= version:
                    # A version once seen is never unseen. A network file system may show an old
                    # listing: then this value is newer. Or a person emptied the folder under a
                    # live group: then it is put back, so that a node that starts finds the group.
                    if self._newest[0] > version:
                        self._link(self._state(self._newest[0]), self._newest[1])
                    return self._newest if self._newest[0] else None
                # The file can be missing only if 16 newer ones were written since the listing.
                with contextlib.suppress(FileNotFoundError):
                    self._newest = version, read_regular(self._state(version), VALUE_LIMIT_BYTES)
                    return self._newest
        raise BackendFailed(
            f"state files in {self._path} vanish faster than they can be read, {READ_TRIES} times in a row"
        )

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        with self._failures("write the group's state"):
            successor = (version or 0) + 1
            newest = max(self._newest[0], *self._versions(), 0)
            if newest != successor - 1 or not self._link(self._state(successor), value):
                return False
            # A process may sleep between the listing above and the link. If 16 newer versions are
            # written meanwhile, the file of `successor` is deleted as too old, and the sleeper then
            # creates it a second time. It recognises that by the distance to the newest version.
            versions = self._versions()
            if max(versions) >= successor + KEPT_VERSIONS:
                self._state(successor).unlink(missing_ok=True)
                return False
            for old in sorted(versions)[:-KEPT_VERSIONS]:
                self._state(old).unlink(missing_ok=True)
            return True

    def beat(self, node_id: str) -> None:
        with self._failures("write a heartbeat"), self._lock:
            self._counters[node_id] = self._counters.get(node_id, 0) + 1
            self._replace(self._path / (_BEAT + quote(node_id, safe="")), str(self._counters[node_id]))

    def beats(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with self._failures("read heartbeats"):
            for name in self._names():
                if name.startswith(_BEAT):
                    with contextlib.suppress(FileNotFoundError, NotRegularFile):
                        counter = parse_number(read_regular(self._path / name, _NUMBER_LIMIT_BYTES))
                        if counter is not None:
                            found[unquote(name.removeprefix(_BEAT))] = counter
        return found

    def publish_generation(self, generation: int) -> None:
        with self._failures("write the newest generation"):
            if read_generation(self._path) < generation:
                self._replace(self._path / "generation", str(generation))

    def shown_generation(self) -> int:
        with self._failures("read the newest generation"):
            return read_generation(self._path)

    def _remove_stale(self, now_s: float) -> None:
        """Remove files of dead processes. An age is a difference of the file system's own times."""
        for name in self._names():
            if name.startswith((_TEMPORARY, _BEAT)):
                with contextlib.suppress(FileNotFoundError):
                    if now_s - (self._path / name).stat().st_mtime > STALE_AFTER_S:
                        # The node may only have slept. Then its next heartbeat creates the file
                        # again, and a state that it was about to link is just not set.
                        (self._path / name).unlink()

    def _names(self) -> list[str]:
        return [path.name for path in self._path.iterdir()]

    def _state(self, version: int) -> Path:
        return self._path / f"state-{version:012d}.json"

    def _versions(self) -> list[int]:
        return [int(match[1]) for name in self._names() if (match := _STATE.fullmatch(name))]

    def _link(self, target: Path, value: bytes) -> bool:
        """Create `target` with this content, whole; False if it exists."""
        try:
            return create_whole(target, value, fsync=False, draft=self._draft())
        except FileNotFoundError:
            return False

    def _replace(self, target: Path, text: str) -> None:
        replace_whole(target, text.encode(), fsync=False, draft=self._draft())

    def _draft(self) -> Path:
        return self._path / f"{_TEMPORARY}{uuid.uuid4().hex}"

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


def read_generation(path: Path) -> int:
    """The newest generation shown in the rendezvous folder `path`; 0 before the first."""
    try:
        text = read_regular(path / "generation", _NUMBER_LIMIT_BYTES)
    except (FileNotFoundError, NotRegularFile):
        return 0
    return parse_number(text) or 0
