"""Nodes are machines on a network of their own.

They share one folder, or nothing but the gates in it. Faults come from outside, so a node cannot
prepare for them. Nodes run as an unprivileged user without capabilities, and nothing is published
on the host. What a node trains is not known here: a cluster starts commands and injects faults.

Each agent is the first process of its container, as a kubelet starts it: nothing reaps its orphans,
a signal for which it has no handler does not reach it, and the image cannot be written to. Of
Kubernetes the kubelet's part is played: containers, signals, names.
"""

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from apt import need
from gates import wait_for
from machines import UNPRIVILEGED, Machines, command
from oracle import AHEAD_S
from supervised import remove

SHARED = "/mnt/shared"
SCRATCH = "/mnt/scratch"  # a machine's own disk
CLOCK = Path(__file__).parent / "clock.c"
FIRST = {"n": 10, "e": 100}  # in the subnet: nodes, etcd's members
MOVE = 30  # of one node to the next of its name
COMMAND = (str(Path(sys.prefix).resolve() / "bin" / "python"), "-m", "elastic.cli")


@dataclass(slots=True, kw_only=True)
class Launch:
    """One start of the command. A node that is started again has another one."""

    node: str
    process: subprocess.Popen[bytes]
    printed: Path


class Cluster(ExitStack):
    """At the end of the block all machines are gone.

    name: what all that is made here begins with (supervised.py).
    settings: of a scenario. With `store` each node starts in a folder of its own.
    gateway: the address of this machine in the nodes' network.
    shared: folder that all nodes see as SHARED. node_files: what nodes print, and their own disks.
    """

    def __init__(self, name: str, settings: Mapping[str, int]) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="cluster-"))
        self.callback(remove, self.folder)
        self.machines = Machines(name, self.folder)
        self.callback(self.machines.close)
        self.shared, self.node_files = self.folder / "shared", self.folder / "nodes"
        self.launches: list[Launch] = []
        # Without swap: else a node becomes slow instead of being killed.
        size = f"{settings.get('memory')}m"
        self._memory = ("--memory", size, "--memory-swap", size) if "memory" in settings else ()
        self._moves: Counter[str] = Counter()
        self._start_folder = SCRATCH if "store" in settings else SHARED
        for folder in (self.shared, self.node_files, *([] if "store" in settings else [self.shared / "run"])):
            give(folder)
        self._subnet = self.machines.open()
        self.gateway = self._subnet[1]

    # Starting.

    @property
    def nodes(self) -> list[str]:
        """In the order in which they were started."""
        return list(dict.fromkeys(launch.node for launch in self.launches))

    def start(self, node: str, words: Sequence[str], env: Mapping[str, str]) -> None:
        """Run `elastic-train WORDS` on a machine whose name is also its host name."""
        printed = self.node_files / f"{node}-{len(self.launches)}.log"
        process = self.make(node, (*COMMAND, *words), printed, env, *self._memory)
        self.launches.append(Launch(node=node, process=process, printed=printed))

    def make(
        self, name: str, words: Sequence[str], printed: Path, env: Mapping[str, str], *options: str
    ) -> subprocess.Popen[bytes]:
        """Any machine. options: for docker."""
        give(self.scratch(name))
        ours = ["--workdir", self._start_folder]
        for here, there in ((self.shared, SHARED), (self.scratch(name), SCRATCH)):
            ours += ["--volume", f"{here}:{there}"]
        for variable, value in env.items():
            ours += ["--env", f"{variable}={value}"]
        return self.machines.make(name, str(self.address(name)), words, printed, [*ours, *options])

    def again(self, node: str, words: Sequence[str], env: Mapping[str, str], *, elsewhere: bool) -> None:
        """Once the machine has ended. elsewhere: with another address and an empty disk, as a pod
        that comes back with its name.
        """
        self.wait(self.newest_launch(node))  # whose address it is until then
        if elsewhere:
            self._moves[node] += 1
            shutil.rmtree(self.scratch(node))
        self.start(node, words, env)

    def address(self, name: str) -> IPv4Address:
        """Of a node (n1, n2, ...), or a member of etcd (e1, ...)."""
        return self._subnet[FIRST[name[0]] + int(name[1:]) - 1] + MOVE * self._moves[name]

    def scratch(self, name: str) -> Path:
        """A machine's own disk, which it sees as SCRATCH."""
        return self.node_files / f"scratch-{name}"

    # Faults.

    def cut(self, node: str, *chains: str) -> None:
        """Drop packets silently from now on: incoming ones with INPUT, outgoing ones with OUTPUT.

        Packets on the node's loopback interface still pass.
        """
        for chain in chains:
            flag = {"INPUT": "-i", "OUTPUT": "-o"}[chain]
            rule = ("-A", chain, "!", flag, "lo", "-j", "DROP")
            self.machines.inside(node, "net", "iptables", "--wait", *rule)

    def heal(self, node: str) -> None:
        self.machines.inside(node, "net", "iptables", "--wait", "-F")

    # Observations.

    def printed(self, node: str) -> str:
        """What its newest start has printed so far."""
        return self.newest_launch(node).printed.read_text(errors="replace")

    def newest_launch(self, node: str) -> Launch:
        return next(launch for launch in reversed(self.launches) if launch.node == node)

    def running(self) -> list[str]:
        return [node for node in self.nodes if self.newest_launch(node).process.poll() is None]

    def wait(self, *launches: Launch) -> list[int]:
        """Exit codes, once all have ended; 137 if the machine was killed.

        Raises TimeoutError.
        """
        names = ", ".join(launch.node for launch in launches)
        wait_for(lambda: all(each.process.poll() is not None for each in launches), f"the end of {names}")
        return [launch.process.wait() for launch in launches]


class WallClocks:
    """The wall clocks of nodes whose processes preload clock.c: each can be put an hour ahead or a
    day back, and the monotonic clocks stay as they are. `jumps`: of which node, and how.
    """

    def __init__(self, shared: Path) -> None:
        """Raises NotAvailable where there is no compiler."""
        need("cc", "build-essential")
        self._shared = shared
        command("cc", "-O2", "-shared", "-fPIC", "-o", str(shared / "clock.so"), str(CLOCK))
        self.jumps = set[tuple[str, str]]()

    def env(self, node: str) -> dict[str, str]:
        """A machine that starts again has the clock that it had."""
        if not self._ahead(node).exists():
            self._ahead(node).write_bytes(struct.pack("=q", 0))
        return {"LD_PRELOAD": f"{SHARED}/clock.so", "CLOCK_AHEAD_S": f"{SHARED}/{self._ahead(node).name}"}

    def jump(self, node: str, how: str) -> None:
        # Written in place, because the node's processes have the file mapped.
        with self._ahead(node).open("r+b") as file:
            file.write(struct.pack("=q", AHEAD_S[how]))
        self.jumps.add((node, how))

    def _ahead(self, node: str) -> Path:
        return self._shared / f"clock-{node}"


def give(folder: Path) -> None:
    """Make the folder, for the user that the nodes run as."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)
