"""A node publishes the address that gloo would choose, and agents listen on that address only.

Agents and workers are then reached the same way. Other machines may still not reach it: a host name
that resolves to a loopback address stays one.
"""

import fcntl
import os
import socket
import struct
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from elastic.errors import UsageError
from elastic.system.untrusted import ENDPOINT

HIGHEST_PORT = 65535
_SIOCGIFADDR = 0x8915  # of linux/sockios.h
_IFNAME_BYTES = 15


def node_address(environ: Mapping[str, str]) -> str:
    """The IPv4 address of the first interface in GLOO_SOCKET_IFNAME, else of the host name.

    127.0.0.1 if the host name has no address. Raises UsageError if the interface does not exist or
    has no address.
    """
    interface = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if interface:
        return _interface_address(interface)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def new_node_id() -> str:
    """A name that no other agent process has, earlier and later ones included."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def split_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Host and port of HOST, HOST:PORT or [IPv6 ADDRESS]:PORT; the host keeps its brackets.

    Raises UsageError for anything else. It does not ask whether the host exists.
    """
    match = ENDPOINT.fullmatch(text)
    port = int(match["port"] or default_port) if match else 0
    if match is None or not 0 < port <= HIGHEST_PORT:
        raise UsageError(
            f"expected an endpoint HOST or HOST:PORT, such as node-1:{default_port} or [::1]:{default_port}, found {text!r}"
        )
    return match["host"], port


def listen_on(address: str, port: int = 0, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """A socket that is bound to `address` only, so that other networks cannot reach it.

    Behind network address translation the address is not this machine's; the socket is then bound
    to all interfaces, as it is for the address "". Port 0 lets the kernel choose. Raises OSError.
    """
    family = socket.AF_INET
    if address:
        with suppress(OSError):
            family, _, _, _, where = socket.getaddrinfo(address, port, type=kind)[0]
            return _bound(family, where, kind)
    # Peers may connect to a stream by IPv4 or IPv6; a datagram socket sends only to its own family.
    is_dual = kind is socket.SOCK_STREAM and socket.has_dualstack_ipv6()
    return _bound(socket.AF_INET6 if is_dual else family, ("", port), kind)


def _bound(family: socket.AddressFamily, where: Any, kind: socket.SocketKind) -> socket.socket:
    if kind is socket.SOCK_STREAM:
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(where, family=family, dualstack_ipv6=is_dual)
    made = socket.socket(family, kind)
    try:
        made.bind(where)
    except BaseException:
        made.close()
        raise
    return made


def _interface_address(interface: str) -> str:
    # struct ifreq begins with the name in 16 bytes. The kernel writes a sockaddr_in after it, whose
    # address is at bytes 20 to 23.
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
