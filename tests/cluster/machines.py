"""A machine has one first process in namespaces of its own, and an address; faults hit all of it.

Two implementations: `containers.py` and, if no container engine runs, `namespaces.py`.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Protocol

UNPRIVILEGED = 1000
# In the private range, and rarely used by home and company networks.
SUBNETS = IPv4Network("10.208.0.0/12")
NETWORK_TRIES = 20
IDLE = ("sleep", "infinity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """words: the command of its first process.

    folders: of this machine, mounted at the given paths.
    programs: files of this machine, mounted at their own paths.
    has_init: there is a process above that of `words`, which reaps orphans. Without it the machine
    is a pod: nothing but its folders can be written.
    """

    name: str
    address: str
    words: tuple[str, ...] = IDLE
    folders: Mapping[Path, str] = field(default_factory=dict)
    programs: tuple[Path, ...] = ()
    memory_mib: int | None = None
    has_init: bool = True


class Machines(Protocol):
    """After `close` nothing is left, even if `make` failed half-way.

    All methods raise RuntimeError.
    """

    def open(self) -> IPv4Network:
        """Make the network, and return it."""

    def make(self, machines: Sequence[Machine]) -> None: ...

    def pid(self, name: str) -> int:
        """The pid on this machine of its first process."""

    def kill(self, *names: str) -> None:
        """Cut the power of all of them at once."""

    def revive(self, *names: str) -> None:
        """Start their first processes again, with the same addresses and disks."""

    def pause(self, *names: str) -> None:
        """Stop all their processes until `unpause`."""

    def unpause(self, *names: str) -> None: ...

    def unplug(self, name: str) -> None:
        """Remove the network interface and with it all connections."""

    def plug(self, name: str) -> None:
        """Bring the interface back, with the same address."""

    def close(self) -> None: ...


def free_subnet(take: Callable[[IPv4Network], object]) -> IPv4Network:
    """A subnet that `take` accepted; fixed addresses need a subnet of their own.

    take: raises RuntimeError for a subnet that is in use.
    """
    failure = "nothing tried"
    for _ in range(NETWORK_TRIES):
        start = int(SUBNETS[0]) + 256 * secrets.randbelow(SUBNETS.num_addresses // 256)
        subnet = IPv4Network((start, 24))
        try:
            take(subnet)
        except RuntimeError as error:
            failure = str(error)
            continue
        return subnet
    raise RuntimeError(f"expected a free subnet in {SUBNETS}, found none in {NETWORK_TRIES} tries: {failure}")
