"""A machine has one first process in namespaces of its own, and an address; faults hit all of it.

Two implementations: `containers.py` and, if no container engine runs, `namespaces.py`. Their `kill`
cuts the power of all machines at once, `revive` starts their first processes again with the same
addresses and disks, and `unplug` removes the network interface and with it all connections. All
methods raise RuntimeError; after `close` nothing is left, even if `make` failed half-way. Either
sees interpreter, packages and sources of this machine, read-only at their own paths: a change needs
no new image, and no image needs a copy of torch.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path

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


def free_subnet(take: Callable[[IPv4Network], object], tries: int = NETWORK_TRIES) -> IPv4Network:
    """A subnet that `take` accepted; fixed addresses need a subnet of their own.

    take: raises RuntimeError for a subnet that is in use.
    """
    start = int(SUBNETS[0]) + 256 * secrets.randbelow(SUBNETS.num_addresses // 256)
    subnet = IPv4Network((start, 24))
    try:
        take(subnet)
    except RuntimeError:
        if tries == 1:
            raise
        return free_subnet(take, tries - 1)
    return subnet


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
