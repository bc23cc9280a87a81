"""Every node of a run gets the same backend from one value; what each kind needs is said here.

dir: a folder that all nodes share. objects: the same in an object store. etcd: a cluster that runs
anyway. c10d: a store on the node whose address is the endpoint. A folder has its own way to be
opened (agent/run_directory.py), because it may lie in the run directory that --fresh renames.

It does not promise that the other nodes were given the same value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from elastic.errors import EXIT_COMPLETE, GroupEnded, RendezvousTimeout, UsageError
from elastic.rendezvous.backends.backend import Backend, BackendFailed, BackendRefused
from elastic.rendezvous.backends.directory import DirectoryBackend
from elastic.rendezvous.backends.host import HostBackend
from elastic.system.clock import Clock

RETRY_S = 0.5

Kind = Literal["dir", "objects", "c10d", "etcd"]
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig:
    """`endpoint`: a folder, its URL, or addresses as in --rdzv-endpoint.

    `group`: the name of the group there; empty for a folder, which holds one group only.
    """

    kind: Kind
    endpoint: str
    group: str

    def check(self, environ: Mapping[str, str]) -> None:
        """Raises UsageError for a malformed address and for credentials that cannot be read."""
        if self.kind in {"etcd", "c10d"}:
            self.open(environ)
        # A folder is checked when it is created, an object store by its first answer.

    def open(self, environ: Mapping[str, str]) -> Backend:
        """Raises UsageError as `check` does. Uses no network before the backend's first call.

        A kind whose import costs more is imported only where it is used: fsspec starts a thread.
        """
        match self.kind:
            case "dir":
                return DirectoryBackend(Path(self.endpoint))
            case "objects":
                from elastic.rendezvous.backends.object_store import ObjectStoreBackend

                return ObjectStoreBackend(self.endpoint)
            case "etcd":
                from elastic.rendezvous.backends.etcd import EtcdBackend

                return EtcdBackend(self.endpoint, self.group, environ)
            case "c10d":
                return HostBackend(self.endpoint, self.group)


def wait_for(
    call: Callable[[], Answer],
    *,
    patience_s: float,
    clock: Clock,
    notify: Callable[[str], None],
    is_complete: Callable[[], bool] = lambda: False,
) -> Answer:
    """What a call to the backend returns once that answers, so that servers and nodes may be
    started in any order.

    is_complete: whether the run is known to have ended well, asked after each call that fails.
    Raises UsageError if it refuses, RendezvousTimeout if it does not answer within `patience_s`,
    GroupEnded for a run that is complete.
    """
    deadline, has_notified = clock.monotonic() + patience_s, False
    while True:
        try:
            return call()
        except BackendRefused as error:
            raise UsageError(str(error)) from error
        except BackendFailed as error:
            if is_complete():
                raise GroupEnded(EXIT_COMPLETE, str(error)) from error
            if clock.monotonic() + RETRY_S > deadline:
                raise RendezvousTimeout(f"{error}; gave up after {patience_s:g} s") from error
            if not has_notified:
                notify(f"{error}; waiting for it")
                has_notified = True
        clock.sleep(RETRY_S)


def serve_until_read(backend: Backend, node_id: str, clock: Clock) -> None:
    """Keep a store that this process serves until the other nodes have read how the run ended.

    That is when no node but `node_id` has sent a heartbeat for a second; it waits 15 s at most.
    """
    if not isinstance(backend, HostBackend) or not backend.is_host:
        return
    last: dict[str, str] = {}
    began_s = moved_s = clock.monotonic()
    while clock.monotonic() < min(began_s + 15.0, moved_s + 1.0):
        try:
            beats = {name: text for name, text in backend.shown().items() if name != node_id}
        except BackendFailed:
            return
        if beats != last:
            last, moved_s = beats, clock.monotonic()
        clock.sleep(0.1)
