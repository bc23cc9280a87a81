"""A machine has one first process in namespaces of its own, and an address; faults hit all of it.

Two implementations: `containers.py` and, if no container engine runs, `namespaces.py`. Either sees
interpreter, packages and sources of this machine, read-only at their own paths: a change needs no
new image, and no image needs a copy of torch.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parents[2]
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


def command(*words: str, check: bool = True, env: dict[str, str] | None = None) -> str:
    """Raises RuntimeError if it fails and `check`, and if there is no such command."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env=os.environ | (env or {})
        )
    except OSError as error:
        raise RuntimeError(f"{words[0]}: {error}") from error
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr.strip()}")
    return done.stdout.strip()


def docker(*words: str, check: bool = True) -> str:
    """The classic builder needs no plugin, and our Dockerfiles need no other."""
    return command("docker", *words, check=check, env={"DOCKER_BUILDKIT": "0"})


def mounts() -> list[Path]:
    """Folders that a node needs: virtual environment, its base interpreter, and sources."""
    base = Path(sys.base_prefix).resolve()
    # The base image has the distribution's interpreter too, and nothing may be mounted over /usr.
    ours = [] if base == Path("/usr") else [base]
    # The scripts in a virtual environment name its path at installation, which may be a symbolic
    # link.
    return list(dict.fromkeys([*ours, Path(sys.prefix).resolve(), Path(sys.prefix), ROOT]))


def interpreter() -> Path:
    return Path(sys.prefix).resolve() / "bin" / "python"
