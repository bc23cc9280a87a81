"""A lack of descriptors or threads ends no node that serves a generation's store or connects to it,
and a node that connects hears signals and the group.

torch does both in one call that hears nothing, for twice its timeout.
"""

import socket
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public by its documentation

from elastic.rendezvous.backends import tcp_store_client
from elastic.rendezvous.backends.tcp_store_client import in_thread

CONNECT_TIMEOUT = timedelta(seconds=10)
STORE_TIMEOUT = timedelta(seconds=300)
ASK_S = 0.05  # between two looks whether a generation is over whose store does not answer


class HostSilent(Exception):  # noqa: N818 - it says what is wrong
    """The store of a generation has not answered by the time at which that is over."""


def serve(address: str, listener: socket.socket) -> TCPStore:
    """A store on a socket that listens already and from now on belongs to the store.

    Raises OSError or RuntimeError, and the socket is closed then.
    """
    # torch connects to its own store, too.
    store = tcp_store_client.serve(address, listener, CONNECT_TIMEOUT)
    store.set_timeout(STORE_TIMEOUT)
    return store


def connect(host: str, port: int, is_over: Callable[[], bool]) -> TCPStore:
    """Raises HostSilent as soon as `is_over()`, and torch's DistError, a RuntimeError."""

    def opened() -> TCPStore:
        return TCPStore(host, port, is_master=False, timeout=CONNECT_TIMEOUT)

    try:
        connecting = in_thread(opened)
    except RuntimeError:
        # No thread can be started for now. To fail here would close the generation for all nodes.
        store = opened()
    else:
        # The thread of a call that is given up ends when that call does.
        while not wait([connecting], ASK_S).done:
            if is_over():
                raise HostSilent(f"{host}:{port} has not answered")
        store = connecting.result()
    store.set_timeout(STORE_TIMEOUT)
    return store
