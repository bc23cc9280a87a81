"""The newest generation fences the saves of a node outside it; it is read again at each check.

A fencing token is a number that only grows: a writer with a smaller one than the newest must stop.
Here the token is the number of the newest generation that the node has entered. A fence finds the
newest number where the rendezvous shows it. It is named by one line of text, so that it can be
passed to the uploader:

file:PATH                      a file with the number, replaced whole when the number grows
mirror:PATH                    a file that this node's agent writes five times a second
etcd:GROUP HOST[:PORT],...     a key of etcd, GROUP percent-encoded; etcdctl's variables say who
                               may read it
objects:URL                    the group's newest version in an object store, which has the number

A fence that cannot be read stops the save. One that does not exist is 0: it stands for the time
before the first generation, and a save of any generation waits until it is there (save.py). Where a
person removed it, the next poll of an agent writes it again. Under torchrun and plain python there
are no agents, and so no fence.

The mirror exists for `--rdzv-backend c10d`, where only a client of torch's TCPStore can read the
number, and the uploader starts without torch. What is in it is only as good as the agent's last
read of the store, so the agent also writes when that began, and the uploader believes a number at
once only while it is younger than a second. Otherwise an uploader and an agent that were both
stopped for a minute (a suspended machine, a paused container) could pass an old number to a save
the moment they wake, and so could an agent that does not reach the store for a moment.
Asking the agent over a socket instead would need three things: a question before each commit, a
notice of every change (or the last number that a dead agent saw would be lost), and a limit for
both. The file is simpler.

It does not promise that no newer generation begins after the answer. When the agent is dead, or the
store of c10d is out of its reach, the number that it saw last counts: the host of that store may be
dead, and the newest state must be saved all the same. A save that passes too late commits a whole
checkpoint, of a state on the run's one trajectory, and replaces none. To delete is another matter:
a newer generation may have resumed from what would go, so that asks a fence that `must_be_fresh`.
"""

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from elastic.config import environment
from elastic.errors import StoreFailed, UsageError
from elastic.rendezvous.backends.backend import Backend, BackendFailed
from elastic.rendezvous.group import Group
from elastic.storage.store import StoreUnavailable, retrying
from elastic.system.clock import Clock, SystemClock, since_boot_s
from elastic.system.files import read_regular, replace_whole
from elastic.system.untrusted import parse_number

FRESH_S = 1.0
CLOSE_S = 1.0


# 0 before the first. Raises StoreFailed when it cannot be found out.
NewestGeneration = Callable[[], int]


class MirrorStale(StoreFailed):
    """The agent is dead, or has not reached the store for a moment."""


def open_fence(text: str | None, *, must_be_fresh: bool = False) -> NewestGeneration:
    """The fence that `text` names; None never fences. Raises UsageError.

    must_be_fresh: it raises MirrorStale where another one would show the number of a mirror whose
    agent does not write it any more.
    """
    if text is None:
        return lambda: 0
    kind, _, where = text.partition(":")
    match kind:
        case "file":
            return lambda: _number(_read(Path(where), missing="0").strip(), Path(where))
        case "mirror":
            return partial(read_mirror, Path(where), SystemClock(), must_be_fresh=must_be_fresh)
        case "etcd":
            # Imported only here, so that other uploaders start faster.
            from elastic.rendezvous.backends.etcd import EtcdBackend
            from elastic.rendezvous.backends.etcd_http import Access

            group, _, endpoints = where.partition(" ")
            etcd = EtcdBackend(endpoints, unquote(group), Access.from_environment(environment.variables()))
            return partial(_ask, etcd.shown_generation, StoreFailed)
        case "objects":
            from elastic.rendezvous.backends.object_store import NO_DELAY, ObjectStoreBackend

            objects = ObjectStoreBackend(where, intervals=NO_DELAY)
            # An object store that is busy for a second must not cost a save: it is asked again.
            return partial(_ask, lambda: _generation_of(objects), StoreUnavailable)
        case _:
            raise UsageError(
                f"expected a fence file:PATH, mirror:PATH, objects:URL or etcd:GROUP HOSTS, found {text!r}"
            )


def read_mirror(path: Path, clock: Clock, *, must_be_fresh: bool = False) -> int:
    """The number in the mirror, once it is fresh, or after FRESH_S.

    A mirror that is not fresh is one whose agent was stopped, together with this process, is dead,
    or does not reach the store. An agent that was stopped writes a new number within the second. A
    dead one never does, nor one that is cut off for longer; then the last number counts, or
    MirrorStale is raised where it must be fresh.
    """
    deadline = clock.monotonic() + FRESH_S
    while True:
        # A missing one is stale, so that this waits for the first one.
        number, _, written = _read(path, missing="0 0").partition(" ")
        generation = _number(number, path)
        age_s = since_boot_s() - _number(written, path) / 1e9
        if age_s < FRESH_S:
            return generation
        if clock.monotonic() > deadline:
            if must_be_fresh:
                raise MirrorStale(f"{path} has shown generation {generation} for more than {FRESH_S} s")
            return generation
        clock.sleep(0.02)


def _ask(shown: Callable[[], int], failure: type[StoreFailed]) -> int:
    """The result of `shown`, which is asked again where its `failure` is StoreUnavailable."""

    def once() -> int:
        try:
            return shown()
        except BackendFailed as error:
            raise failure(
                f"the newest generation cannot be read ({error}); nothing is committed without it"
            ) from error

    clock = SystemClock()
    return retrying(once, clock=clock, deadline=clock.monotonic() + 30.0)


def _generation_of(backend: Backend) -> int:
    found = backend.read()
    return 0 if found is None else Group.parse(found[1]).generation


class Mirror:
    """The agent's end of a mirror: a thread that writes the result of `shown` until `close`."""

    def __init__(self, shown: Callable[[], int], path: Path) -> None:
        self._shown = shown
        self._path = path
        self._generation = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fence-mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(CLOSE_S)  # a call may hang, and ends with the process then

    def _run(self) -> None:
        while not self._closed.wait(0.2):
            # The mirror stays as it is while the store is out of reach, or a disk is full: its time
            # then shows that its number is old. If an exception ended this thread, that would last
            # for ever. The agent's own calls to the store report the problem.
            with contextlib.suppress(Exception):
                looked_s = since_boot_s()
                self._generation = max(self._generation, self._shown())
                text = f"{self._generation} {int(looked_s * 1e9)}"
                replace_whole(self._path, text.encode(), fsync=False)


def _read(path: Path, *, missing: str) -> str:
    """missing: the text of a file that does not exist yet."""
    try:
        return read_regular(path, limit_bytes=64).decode(errors="replace")
    except FileNotFoundError:
        return missing
    except OSError as error:
        raise StoreFailed(
            f"the fence {path} cannot be read ({error}); nothing is committed without it"
        ) from error


def _number(text: str, path: Path) -> int:
    found = parse_number(text)
    if found is None:
        raise StoreFailed(f"expected the number of the newest generation in {path}, found {text[:40]!r}")
    return found
