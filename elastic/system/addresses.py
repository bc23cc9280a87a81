"""The address that a node publishes is the one that gloo would choose, so that agents and workers are reached the same way.

It does not promise that other machines can reach it: a host name that resolves to a loopback address stays one.
"""

import fcntl
import os
import socket
import struct
import uuid
from collections.abc import Mapping

from elastic.errors import UsageError

_SIOCGIFADDR = 0x8915  # of linux/sockios.h
_IFNAME_BYTES = 15


def node_address(environ: Mapping[str, str]) -> str:
    """IPv4 address of the interface in GLOO_SOCKET_IFNAME (its first, if a list), else of the host name, else 127.0.0.1.

    Raises UsageError if that interface does not exist or has no address.
    """
    interface = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if interface:
        return _interface_address(interface)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def new_node_id() -> str:
    """A name for this agent process that no other process, before or after it, has."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _interface_address(interface: str) -> str:
    # struct ifreq begins with the name in 16 bytes; the answer puts a sockaddr_in behind it, its address at 20 to 24.
    request = struct.pack("256s", interface.encode()[:_IFNAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise UsageError(
                f"GLOO_SOCKET_IFNAME should name an interface with an IPv4 address, found {interface!r}"
                f" ({error.strerror}); this machine has {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])
