"""What a cluster wants of its machines: each is a first process in namespaces of its own, at an address of its own, and can be harmed as a whole.

Two kinds keep this contract: `containers.py` and, where no engine runs, `namespaces.py`.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Protocol

UNPRIVILEGED = 1000
# Of the private range; most home and company networks use others.
SUBNETS = IPv4Network("10.208.0.0/12")
NETWORK_TRIES = 20
IDLE = ("sleep", "infinity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`words`: its first process; `folders`: of this machine, and where they are in there; `programs`: files of this machine that it needs as they are."""

    name: str
    address: str
    words: tuple[str, ...] = IDLE
    folders: Mapping[Path, str] = field(default_factory=dict)
    programs: tuple[Path, ...] = ()
    memory_mib: int | None = None


class Machines(Protocol):
    """Whatever was made is gone after `close`, however far it got. All raise RuntimeError with what was complained."""

    def open(self) -> IPv4Network:
        """The network that they are on."""

    def make(self, machines: Sequence[Machine]) -> None: ...

    def pid(self, name: str) -> int:
        """Of its first process, on this machine."""

    def kill(self, *names: str) -> None:
        """They lose their power, all at once."""

    def revive(self, *names: str) -> None:
        """Their first processes begin again, at their addresses, with what was on their disks."""

    def pause(self, *names: str) -> None:
        """No process of theirs does anything until `unpause`."""

    def unpause(self, *names: str) -> None: ...

    def unplug(self, name: str) -> None:
        """The interface disappears, and its connections with it."""

    def plug(self, name: str) -> None:
        """Back with the address that it had."""

    def close(self) -> None: ...


def free_subnet(take: Callable[[IPv4Network], object]) -> IPv4Network:
    """One that `take` did not refuse, with RuntimeError: fixed addresses need a subnet of one's own."""
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
