"""A save of an older generation is fenced by the newest one, which is read again for each question.

A fencing token is a number that only grows: a writer with a smaller one than the newest must stop.
Here the token is the number of the generation. A fence finds the newest number where the rendezvous
shows it. It is named by one line of text, so that it can be passed to the uploader:

file:PATH                      a file with the number, replaced whole when the number grows
mirror:PATH                    a file that this node's agent writes five times a second
etcd:GROUP HOST[:PORT],...     a key of etcd; etcdctl's variables say who may read it
objects:URL                    the group's newest version in an object store, which has the number

A fence that cannot be read stops the save. Before the first generation nothing is fenced.

The mirror exists for `--rdzv-backend c10d`, where only a client of torch's TCPStore can read the
number, and the uploader starts without torch. What is in it is only as good as the agent's last
read of the store, so the agent also writes the time, and the uploader believes a number only while
it is younger than a second. Otherwise an uploader and an agent that were both stopped for a minute
(a suspended machine, a paused container) could pass an old number to a save the moment they wake.
Asking the agent over a socket instead would need three things: a question before each commit, a
notice of every change (or the last number that a dead agent saw would be lost), and a limit for
both. The file is simpler.

It does not promise that no newer generation begins after the answer. When the agent is dead, the
number that it saw last counts. The store's exclusive commit is the last fence.
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
_POLL_S = 0.02
_LIMIT_BYTES = 64


class Fence(Protocol):
    def newest(self) -> int:
        """The newest generation; 0 before the first.

        Raises StoreFailed when that cannot be found out.
        """


def open_fence(text: str | None) -> Fence:
    """The fence that `text` names; None never fences. Raises UsageError."""
    if text is None:
        return NoFence()
    kind, _, where = text.partition(":")
    match kind:
        case "file":
            return FileFence(Path(where))
        case "mirror":
            return MirrorFence(Path(where), SystemClock())
        case "etcd":
            # Imported only here, so that other uploaders start faster.
            from elastic.rendezvous.backends.etcd import EtcdBackend
            from elastic.rendezvous.backends.etcd_http import Access

            group, _, endpoints = where.partition(" ")
            return PublishedFence(
                EtcdBackend(endpoints, group, Access.from_environment(environment.variables()))
            )
        case "objects":
            from elastic.rendezvous.backends.object_store import NO_DELAY, ObjectStoreBackend

            return GroupStateFence(ObjectStoreBackend(where, intervals=NO_DELAY), SystemClock())
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
        """The number in the mirror, once it is fresh, or after FRESH_S.

        A mirror that is not fresh is one whose agent was stopped, together with this process, or is
        dead. An agent that was stopped writes a new number within the second; a dead one never
        does, and then its last number counts.
        """
        deadline = self._clock.monotonic() + FRESH_S
        while True:
            number, _, written = self._text().partition(" ")
            generation = _number(number, self._path)
            age_s = since_boot_s() - _number(written, self._path) / 1e9
            if age_s < FRESH_S or self._clock.monotonic() > deadline:
                return generation
            self._clock.sleep(_POLL_S)

    def _text(self) -> str:
        try:
            return _read(self._path)
        except FileNotFoundError:
            return "0 0"  # stale, so that `newest` waits for the first one


class PublishedFence:
    def __init__(self, backend: PublishesGeneration) -> None:
        self._backend = backend

    def newest(self) -> int:
        try:
            return self._backend.shown_generation()
        except BackendFailed as error:
            raise StoreFailed(
                f"the newest generation cannot be read ({error}); nothing is committed without it"
            ) from error


class GroupStateFence:
    """Reads the number from the group's state.

    It tries again for a while, because an object store that is busy for a second must not cost a
    save.
    """

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
    """The agent's end of a mirror: a thread that writes the result of `shown` until `close`."""

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
            # While the store is out of reach no newer generation can be formed, so the number is
            # still right. If an exception ended this thread, its silence would be taken for the
            # agent's death. The agent's own calls to the store report the problem.
            with contextlib.suppress(Exception):
                self._generation = max(self._generation, self._shown())
            # Nor may a full disk end it: the mirror stays as it is until there is room again.
            with contextlib.suppress(OSError):
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
