"""One JSON object a line over a stream of bytes: what arrives in pieces is cut into whole objects, or refused; never pickle.

It does not promise who is at the other end.
"""

import json
from typing import Any

from elastic.system.untrusted import parse_json

LINE_LIMIT_BYTES = 64 * 1024


class Lines:
    """Cuts a stream of bytes into JSON objects."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The objects of the lines that `data` completes. Raises ValueError for what is not an object or is too long."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_LIMIT_BYTES:
            raise ValueError(f"a line is longer than {LINE_LIMIT_BYTES} bytes")
        return [_object(line) for line in whole]


def to_line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _object(line: bytes) -> dict[str, Any]:
    found = parse_json(line)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {line[:80]!r}")  # noqa: TRY004 - like any other malformed line
    return found
