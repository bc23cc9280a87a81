"""A stream of bytes becomes whole JSON objects, one for each line, or an error; never pickle.

`JsonLines` only cuts bytes; `JsonLineSocket` does so over a socket, and carries open files beside
the lines. Neither promises who is at the other end.
"""

import json
import os
import select
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from elastic.system.untrusted import parse_json

LINE_LIMIT_BYTES = 64 * 1024


class JsonLines:
    """Cuts a stream of bytes into JSON objects.

    A line longer than `limit_bytes` is an error, not a reason to buffer on.
    """

    def __init__(self, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The objects of the lines that `data` completes.

        Raises ValueError for a line that is not a JSON object, or that is too long.
        """
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._limit_bytes:
            raise ValueError(f"a line is longer than {self._limit_bytes} bytes")
        return [_object(line) for line in whole]


class JsonLineSocket:
    """One end of a connected stream socket; owns the socket, and descriptors that came and were not
    taken.

    Descriptors travel as SCM_RIGHTS. The kernel delivers them in order, with the first byte of the
    message that they were sent with, so the receiver takes them in the order of the lines that
    announce them.
    """

    def __init__(
        self, connection: socket.socket, *, limit_bytes: int = LINE_LIMIT_BYTES, most_fds: int = 0
    ) -> None:
        """At most `most_fds` descriptors may wait to be taken; with 0 the kernel drops all that are
        sent.
        """
        self._connection = connection
        self._lines = JsonLines(limit_bytes)
        self._most_fds = most_fds
        self._fds: deque[int] = deque()
        self.has_ended = False  # the other side will send no more

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any], fds: Sequence[int] = (), *, timeout_s: float | None) -> None:
        """Send the whole line, or raise OSError; 0 does not wait at all, None waits without a
        limit.

        After an error an unknown part of the line was sent, so that the connection is of no use any
        more.
        """
        line = to_line(message)
        self._connection.settimeout(timeout_s)
        sent_bytes = socket.send_fds(self._connection, [line], fds) if fds else self._connection.send(line)
        # Even an empty write fails once the other side has answered and closed.
        if sent_bytes < len(line):
            self._connection.sendall(line[sent_bytes:])

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have arrived, without waiting; sets `has_ended` at the end of the
        stream.

        Raises OSError for a broken connection, and ValueError for lines that are not messages or
        for descriptors that no message announced. A peer that never stops sending cannot hold up
        the caller: the rest is left for later.
        """
        for _ in range(64):
            self._connection.setblocking(False)
            try:
                data, fds, _, _ = socket.recv_fds(self._connection, LINE_LIMIT_BYTES, self._most_fds)
            except BlockingIOError:
                return
            self._fds.extend(fds)
            if len(self._fds) > self._most_fds:
                raise ValueError(f"more than {self._most_fds} descriptors came without their messages")
            if not data:
                self.has_ended = True
                return
            yield from self._lines.feed(data)

    def wait(self, timeout_s: float) -> None:
        """Return when a message, or the end of the stream, has arrived, or after `timeout_s`."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.poll(max(0.0, timeout_s) * 1000)

    def take_fd(self) -> int:
        """The next descriptor, which belongs to the caller from here on.

        Raises ValueError when none came.
        """
        if not self._fds:
            raise ValueError("expected a descriptor with the message, found none")
        return self._fds.popleft()

    def shutdown(self) -> None:
        """End the connection in both directions. Raises OSError."""
        self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
        while self._fds:
            os.close(self._fds.popleft())


def to_line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _object(line: bytes) -> dict[str, Any]:
    found = parse_json(line)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {line[:80]!r}")  # noqa: TRY004 - like any other malformed line
    return found
