"""How many bytes a process has sent over the TCP connections that it has open now.

The kernel counts them for each connection (TCP_INFO), with what a library adds to its tensors, and
whatever the collective was. Connections that were closed before are not in the count, nor is what
goes through shared memory, as between GPUs of one machine.
"""

import ctypes
import os
import socket
import struct
from pathlib import Path

_PIDFD_GETFD = 438  # of the kernel, from 5.6 on, alike on all machines
_TCP_INFO_BYTES = 256
_BYTES_SENT_AT = 200  # tcpi_bytes_sent, in struct tcp_info of linux/tcp.h, from Linux 4.19 on
_libc = ctypes.CDLL(None, use_errno=True)


def sent_bytes(pid: int) -> int:
    """Raises OSError where the kernel does not let us look: containers may forbid it."""
    watched = os.pidfd_open(pid)
    try:
        sockets = [each for each in Path(f"/proc/{pid}/fd").iterdir() if _is_socket(each)]
        return sum(_sent(watched, int(each.name)) for each in sockets)
    finally:
        os.close(watched)


def _is_socket(path: Path) -> bool:
    try:
        return path.readlink().name.startswith("socket:")
    except FileNotFoundError:  # closed in the meantime
        return False


def _sent(watched: int, fd: int) -> int:
    own = _libc.syscall(_PIDFD_GETFD, watched, fd, 0)
    if own < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=own) as connection:
        if (
            connection.family not in (socket.AF_INET, socket.AF_INET6)
            or connection.type != socket.SOCK_STREAM
        ):
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _BYTES_SENT_AT + 8:
        raise OSError("expected a kernel that counts the bytes of a connection: Linux 4.19 or newer")
    sent: int = struct.unpack_from("=Q", info, _BYTES_SENT_AT)[0]
    return sent
