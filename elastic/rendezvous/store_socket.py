"""Each generation has a fresh store, on a socket that an agent binds before it tells the address.

The store itself is torch's, and the first worker of that agent serves it (train/groups.py); under
torchrun its agent does (torchrun.py). Until then the others wait in the socket's queue. So our own
agent needs no torch, and a store ends with the process that serves it: peers lose a connection, as
they do when any worker dies.
"""

import socket

from elastic.rendezvous.backends.backend import BackendFailed
from elastic.system.addresses import listen_on

MOST_TRIES = 8  # to form a generation, whose sockets stay
MOST_WAITING = 4096  # workers of a wide group that come before the store is served


class StoreSockets:
    """Of the generations that this node has tried to form since it entered one.

    Several stay, because the outcome of a write may be known late: the group may name the store of
    an earlier try.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._listening: dict[str, socket.socket] = {}  # by "host:port"

    def open(self) -> str:
        """Listen on a free port of the node's address; returns "host:port".

        Raises BackendFailed where there is no descriptor for it: that may pass.
        """
        try:
            listening = listen_on(self.address)
            listening.listen(MOST_WAITING)
        except OSError as error:
            raise BackendFailed(
                f"this node should serve the store of the next generation at {self.address}, but cannot: {error};"
                " trying again"
            ) from error
        endpoint = f"{self.address}:{listening.getsockname()[1]}"
        self._listening[endpoint] = listening
        for earlier in list(self._listening)[:-MOST_TRIES]:
            self._listening.pop(earlier).close()
        return endpoint

    def take(self, endpoint: str) -> socket.socket | None:
        """The socket of a generation that is entered, if this node formed it; others are closed."""
        found = self._listening.pop(endpoint, None)
        for each in self._listening.values():
            each.close()
        self._listening = {}
        return found
