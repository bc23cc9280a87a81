"""The store of a generation is served by one of its workers, and ends with that worker.

Its agent has bound the listening socket before the address was published (agent/store_socket.py).
A worker that connects earlier waits in the queue of that socket, without limit: an agent whose node
dies or is cut off is evicted, and the others then kill their workers.
"""

import os
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # public by its documentation

TIMEOUT = timedelta(minutes=30)  # for a key that is absent: torch's own for a group that opens


def open_store(host: str, port: int, listening_fd: int | None) -> Store:
    """Serve the store on that socket, or connect to the worker that does."""
    if listening_fd is None:
        return TCPStore(host, port, is_master=False, timeout=TIMEOUT)
    # Under another number, so that `closing_with_this_process` takes it for a new socket.
    own_fd = os.dup(listening_fd)
    os.close(listening_fd)
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=own_fd
    )
