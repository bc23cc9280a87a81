"""An endpoint is HOST or HOST:PORT, an IPv6 address in brackets; anything else is refused before somebody tries to reach it.

It does not ask whether the host exists.
"""

import re

from elastic.errors import UsageError

_ENDPOINT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+)(?::(?P<port>[0-9]{1,5}))?")
HIGHEST_PORT = 65535


def split_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Host, with its brackets where it has some, and port. Raises UsageError."""
    match = _ENDPOINT.fullmatch(text)
    port = int(match["port"] or default_port) if match else 0
    if match is None or not 0 < port <= HIGHEST_PORT:
        raise UsageError(
            f"expected an endpoint HOST or HOST:PORT, such as node-1:{default_port} or [::1]:{default_port}, found {text!r}"
        )
    return match["host"], port
