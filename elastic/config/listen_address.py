"""HOST:PORT on this machine, written as an address to listen on."""

import re
from dataclasses import dataclass

from elastic.errors import UsageError

HIGHEST_PORT = 65535
_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]|(?P<host>[A-Za-z0-9_.-]+)):(?P<port>[0-9]{1,5})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """host: a name or an address without brackets. port: 0 leaves the choice to the kernel."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> "ListenAddress":
        """Raises UsageError. It does not ask whether this machine has the address."""
        match = _ADDRESS.fullmatch(text)
        if match is None or int(match["port"]) > HIGHEST_PORT:
            raise UsageError(
                f"expected HOST:PORT such as 127.0.0.1:9100, [::1]:9100, or 0.0.0.0:9100 for all interfaces (port 0: any free one), found {text!r}"
            )
        return ListenAddress(host=match["ipv6"] or match["host"], port=int(match["port"]))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
