"""A call of torch's TCPStore ends within seconds, also if the host is frozen or gone.

torch's client has no limit for an answer: its timeout is one for keys that are absent. If the host
is frozen or loses power, no packet resets the connection, and the client's `recv` waits for ever,
with the GIL released and the calling thread lost: no Python signal handler and no exception reaches
it. Its constructor waits in the same way, and a client that lost its connection never connects
again. TCPStore does not give access to its socket.

So this module finds the socket below the client among the open files of the process
(/proc/self/fd), by the address of its peer, and sets limits on it that the kernel keeps
(SO_RCVTIMEO, SO_SNDTIMEO). During the constructor a watchdog thread shuts such sockets down once
its limit has passed. A client that failed once is thrown away for a fresh one, because it may be in
the middle of an answer.

To connect, the host's name is looked up, and torch looks up the name of the peer's address; neither
lookup has a limit but the resolver's own, 10 s and more where no name server answers. So each try
to connect has a thread. A caller waits for it for OPEN_S; while it takes longer, calls fail at
once, and no second thread is started. No other thread is left behind.

It does not promise that a call that failed had no effect. Nor does it limit the same lookup in a
call over an open connection that breaks, where torch writes the peer's name to standard error, nor
in the store itself, for each node that connects.
"""

import contextlib
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public by its documentation

from elastic.rendezvous.backends.backend import BackendFailed
from elastic.system.addresses import listen_on
from elastic.system.clock import Clock

CONNECT_S = 0.5
ANSWER_S = 1.0
OPEN_S = CONNECT_S + ANSWER_S
RETRY_S = 0.5
ABORT_EVERY_S = 0.1
SPARE_DESCRIPTORS = 16  # torch takes 10 to serve a store

_TIMEVAL = struct.Struct("@ll")  # struct timeval: seconds and microseconds


class TcpStoreClient:
    """One connection, for one caller at a time; other threads wait for their turn."""

    def __init__(self, host: str, port: int, *, may_host: Callable[[], bool], clock: Clock) -> None:
        """may_host: whether to serve the store if no other process of this machine does.

        It is asked at each try to connect: the name of a pod may have no address yet when its agent
        starts, or still that of the pod before it.
        """
        self._host = host
        self._port = port
        self._may_host = may_host
        self._clock = clock
        self._lock = threading.RLock()
        self._server: TCPStore | None = None
        self._client: TCPStore | None = None
        self._opening: Future[TCPStore] | None = None  # a try to connect that no call has seen end
        self._retry_s, self._reason = float("-inf"), ""  # after a failure
        self.connections = 0  # so far; after a new connection the store may be another, empty one

    @property
    def is_host(self) -> bool:
        return self._server is not None

    def close(self) -> None:
        """Disconnect, and end the store if this process serves it."""
        with self._lock:
            self._may_host = lambda: False
            self._end()
            if self._opening is not None:
                self._opening.add_done_callback(lambda _: self._end())
                self._opening = None

    @contextlib.contextmanager
    def use(self, what: str) -> Iterator[TCPStore]:
        """The connected store. Raises BackendFailed if it cannot be reached, or a call of it fails.

        what: the purpose, for the message: "could not <what>".
        """
        with self._lock:
            # Polls come many times a second, and each would wait for the host again.
            if self._client is None and self._clock.monotonic() < self._retry_s:
                raise self._failure(what)
            try:
                yield self._connected()
            except (OSError, RuntimeError) as error:  # RuntimeError: torch's DistError and its children
                self._client = None
                self._reason = (str(error).splitlines() or ["no reason"])[0]
                self._retry_s = self._clock.monotonic() + RETRY_S
                raise self._failure(what) from error

    def _connected(self) -> TCPStore:
        if self._client is None:
            is_new = self._opening is None
            opening = self._opening = self._opening or in_thread(self._open)
            if not wait([opening], OPEN_S if is_new else 0.0).done:
                raise TimeoutError("to connect takes longer, as where no name server answers")
            self._opening = None
            self._client = opening.result()
            self.connections += 1
        return self._client

    def _open(self) -> TCPStore:
        if self._server is None and self._may_host():
            self._server = _serve(self._host, self._port)
        return _connect(self._host, self._port)

    def _end(self) -> None:
        self._client = self._server = None

    def _failure(self, what: str) -> BackendFailed:
        return BackendFailed(
            f"could not {what}: the store at {self._host}:{self._port} should answer within {ANSWER_S:g} s, but did not ({self._reason});"
            f" does the agent on that host run? This one goes on by itself when it is back"
        )


def in_thread(act: Callable[[], TCPStore]) -> Future[TCPStore]:
    """Raises RuntimeError where no thread can be started."""
    future: Future[TCPStore] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except Exception as error:  # raised again by the call that asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name="store-connect", daemon=True).start()
    return future


def is_own_address(host: str) -> bool:
    """Whether `host` names an address of this machine: no other address can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return True
    return False


def _serve(host: str, port: int) -> TCPStore | None:
    """A store that listens there; None if another process of this machine does already."""
    try:
        # A host name often resolves to a loopback address on the host itself, where other machines
        # could not connect: so listen on all interfaces for a name.
        listener = listen_on(host if _is_address(host) else "", port)
    except OSError:
        return None
    with _abort_after(ANSWER_S, host, port):
        return serve(host, listener, timedelta(seconds=ANSWER_S))


def serve(host: str, listener: socket.socket, timeout: timedelta) -> TCPStore:
    """A store on a socket that listens already and from now on belongs to the store.

    Raises OSError or RuntimeError, and the socket is closed then. Where torch finds no descriptor
    for the pipes of its event loop, that loop aborts the process, so some are counted before;
    another thread may take them all the same.
    """
    _check_descriptors(listener)
    inode, port, fd = os.fstat(listener.fileno()).st_ino, listener.getsockname()[1], listener.detach()
    try:
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd
        )
    except RuntimeError:
        # torch leaves the socket open where it cannot begin to serve: each try would cost one more
        # of the descriptors that are lacking. If it has closed the socket, the number may be that
        # of another file by now.
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == inode:
                os.close(fd)
        raise


def _check_descriptors(listener: socket.socket) -> None:
    """Close `listener` and raise OSError if it is one of the last descriptors of the process."""
    try:
        with contextlib.ExitStack() as spare:
            for _ in range(SPARE_DESCRIPTORS):
                spare.enter_context(listener.dup())
    except OSError:
        listener.close()
        raise


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return host == "localhost"


def _connect(host: str, port: int) -> TCPStore:
    # torch's client repeats a refused connection and writes each refusal to standard error. This
    # tries once, and quietly.
    with socket.create_connection((host, port), timeout=CONNECT_S):
        pass
    limit, timeval = timedelta(seconds=ANSWER_S), _TIMEVAL.pack(int(ANSWER_S), int(ANSWER_S % 1 * 1e6))
    with _abort_after(ANSWER_S, host, port) as addresses:
        client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    for found in _sockets_to(addresses):
        with found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    return client


@contextlib.contextmanager
def _abort_after(limit_s: float, host: str, port: int) -> Iterator[set[tuple[str, int]]]:
    """While the body runs longer than `limit_s`, shut down all connections to `host` and `port`.

    Once is not enough: torch's client connects again, so it is done every ABORT_EVERY_S. Raises
    OSError, before the body, for a name that has no address.
    """
    addresses, is_over = _addresses(host, port), threading.Event()

    def watch() -> None:
        wait_s = limit_s
        while not is_over.wait(wait_s):
            wait_s = ABORT_EVERY_S
            for found in _sockets_to(addresses):
                with found, contextlib.suppress(OSError):
                    found.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=watch, name="store-limit", daemon=True)
    thread.start()
    try:
        yield addresses
    finally:
        is_over.set()
        thread.join()


def _addresses(host: str, port: int) -> set[tuple[str, int]]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {(str(address[0]), port) for *_, address in infos}


def _sockets_to(addresses: set[tuple[str, int]]) -> list[socket.socket]:
    """The connections of this process to there, each under a new descriptor of its own."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not str(link.readlink()).startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(link.name)))
            if _peer(one) in addresses:
                found.append(one)
            else:
                one.close()
    return found


def _peer(one: socket.socket) -> tuple[str, int] | None:
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        host, port = one.getpeername()[:2]
    except OSError:
        return None
    return str(host).removeprefix("::ffff:"), int(port)
