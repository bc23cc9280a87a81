"""A node's heartbeats go on whatever its other threads wait for, and a failed one is tried again.

A heartbeat is the text that a node shows: a number that grows, and after a space what the node
requests, if anything (group_writer.py). So a request that is taken back is gone with the next one.

The thread ends only when it is stopped: were one failed write its end, the others would take a
healthy node for dead some seconds later.
"""

import threading
from collections.abc import Callable

from elastic.rendezvous.backends.backend import Backend
from elastic.rendezvous.failure_detector import NO_HEARTBEAT
from elastic.system.untrusted import parse_number

BEATS_PER_KEEP_ALIVE = 5
STOP_S = 1.0


def counter_of(text: str) -> int:
    """NO_HEARTBEAT for any other text."""
    number = parse_number(text.partition(" ")[0])
    return NO_HEARTBEAT if number is None else number


def request_of(text: str) -> str:
    """Empty for none."""
    return text.partition(" ")[2]


class Heartbeat:
    """Sends the heartbeats of one node from `start` to `stop`, on a thread of its own.

    problem: why the last one failed; empty while they arrive.
    """

    def __init__(
        self, backend: Backend, node_id: str, *, keep_alive_s: float, notify: Callable[[str], None]
    ) -> None:
        self.problem = ""
        self._backend = backend
        self._node_id = node_id
        self._every_s = keep_alive_s / BEATS_PER_KEEP_ALIVE
        self._notify = notify
        self._count, self._request = 0, ""
        self._lock = threading.RLock()  # held until a text is shown: none comes after a newer one
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rendezvous-beat", daemon=True)

    def start(self) -> None:
        """Send the first one before this returns; nothing if it was started before."""
        if self._thread.ident is None:
            self.beat()
            self._thread.start()

    def beat(self) -> None:
        with self._lock:
            self._count += 1
            self._backend.show(self._node_id, f"{self._count} {self._request}".rstrip())

    def ask(self, request: str) -> None:
        """Show from now on what the node requests; nothing, if this fails."""
        with self._lock:
            self._request = request
            try:
                self.beat()
            except BaseException:
                self._request = ""
                raise

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)  # a call may hang, and ends with the process then

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self.beat()
                self.problem = ""
            except Exception as error:
                # The thread's edge: see above.
                if self.problem != str(error):
                    self._notify(f"heartbeat failed: {error}")
                self.problem = str(error)
