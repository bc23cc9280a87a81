"""A save is fenced by the newest generation that the rendezvous shows, read where it is shown at the moment of asking.

A fence is one line of text, so that it can be handed to another process:

file:PATH                      a file with the number, replaced whole when it grows
mirror:PATH                    a file that the agent of this node writes anew several times a second, with the number and the time
etcd:GROUP HOST[:PORT],...     a key of etcd; who may read it is said by the variables of etcdctl
objects:URL                    the group's newest version in an object store, which says its generation itself

A fence that cannot be read stops a save; nobody is fenced before the first generation. A mirror is as good as the agent's last look: of an agent that is dead the number that
it saw last counts, and the store's exclusive commit is what finally fences.
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from elastic.config import environment
from elastic.errors import StoreFailed, UsageError
from elastic.rendezvous.backends.backend import Backend, BackendFailed, PublishesGeneration
from elastic.rendezvous.group import Group
from elastic.storage.store import StoreUnavailable, retrying
from elastic.system.clock import Clock, SystemClock, since_boot_s
from elastic.system.files import read_regular, replace_whole
from elastic.system.untrusted import parse_number

FRESH_S = 1.0
MIRROR_EVERY_S = 0.2
ASK_FOR_S = 30.0
_LOOK_S = 0.02
_LIMIT_BYTES = 64


class Fence(Protocol):
    def newest(self) -> int:
        """The newest generation; 0 before the first. Raises StoreFailed when that cannot be found out."""


def open_fence(text: str | None) -> Fence:
    """What `text` names; without one nobody is ever fenced. Raises UsageError."""
    if text is None:
        return NoFence()
    kind, _, where = text.partition(":")
    match kind:
        case "file":
            return FileFence(Path(where))
        case "mirror":
            return MirrorFence(Path(where), SystemClock())
        case "etcd":
            # Only here: an uploader that does not need them should not wait for what they import.
            from elastic.rendezvous.backends.etcd import EtcdBackend
            from elastic.rendezvous.backends.etcd_http import Access

            group, _, endpoints = where.partition(" ")
            return ShownFence(EtcdBackend(endpoints, group, Access.from_environment(environment.variables())))
        case "objects":
            from elastic.rendezvous.backends.object_store import NO_DELAY, ObjectStoreBackend

            return GroupFence(ObjectStoreBackend(where, intervals=NO_DELAY), SystemClock())
        case _:
            raise UsageError(
                f"expected a fence file:PATH, mirror:PATH, objects:URL or etcd:GROUP HOSTS, found {text!r}"
            )


class NoFence:
    def newest(self) -> int:
        return 0


class FileFence:
    def __init__(self, path: Path) -> None:
        self._path = path

    def newest(self) -> int:
        try:
            return _number(_read(self._path).strip(), self._path)
        except FileNotFoundError:
            return 0


class MirrorFence:
    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock

    def newest(self) -> int:
        """Waits a moment for an agent that was asleep, as this process then was: what it saw before is worth nothing now."""
        deadline = self._clock.monotonic() + FRESH_S
        while True:
            number, _, written = self._text().partition(" ")
            generation = _number(number, self._path)
            age_s = since_boot_s() - _number(written, self._path) / 1e9
            if age_s < FRESH_S or self._clock.monotonic() > deadline:
                return generation
            self._clock.sleep(_LOOK_S)

    def _text(self) -> str:
        try:
            return _read(self._path)
        except FileNotFoundError:
            return "0 0"  # as from before the first look: an agent that lives writes one soon


class ShownFence:
    def __init__(self, backend: PublishesGeneration) -> None:
        self._backend = backend

    def newest(self) -> int:
        try:
            return self._backend.shown_generation()
        except BackendFailed as error:
            raise StoreFailed(
                f"the newest generation cannot be read ({error}); nothing is committed without it"
            ) from error


class GroupFence:
    """Asks again for a while: an object store that is busy for a second must not cost a save."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock

    def newest(self) -> int:
        return retrying(self._ask, clock=self._clock, deadline=self._clock.monotonic() + ASK_FOR_S)

    def _ask(self) -> int:
        try:
            found = self._backend.read()
        except BackendFailed as error:
            raise StoreUnavailable(
                f"the newest generation cannot be read ({error}); nothing is committed without it"
            ) from error
        return 0 if found is None else Group.parse(found[1]).generation


class Mirror:
    """The agent's side of a mirror: a thread that writes what `shown` says until it is closed."""

    def __init__(self, shown: Callable[[], int], path: Path) -> None:
        self._shown = shown
        self._path = path
        self._generation = 0
        self._closed = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._run, name="fence-mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(MIRROR_EVERY_S):
            # While the store is away no newer generation can be formed, so what was seen stays true; and were this thread to end, its
            # silence would be taken for the agent's death. The agent's own looks say what is wrong.
            with contextlib.suppress(Exception):
                self._generation = max(self._generation, self._shown())
            self._write()

    def _write(self) -> None:
        replace_whole(self._path, f"{self._generation} {int(since_boot_s() * 1e9)}".encode(), fsync=False)


def _read(path: Path) -> str:
    try:
        return read_regular(path, _LIMIT_BYTES).decode(errors="replace")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreFailed(
            f"the fence {path} cannot be read ({error}); nothing is committed without it"
        ) from error


def _number(text: str, path: Path) -> int:
    found = parse_number(text)
    if found is None:
        raise StoreFailed(f"expected the number of the newest generation in {path}, found {text[:40]!r}")
    return found
