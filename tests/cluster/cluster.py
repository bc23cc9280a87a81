"""Nodes are machines on a network of their own.

They share one folder, or nothing but the gates in it. Faults come from outside, so a node cannot
prepare for them. Nodes run as an unprivileged user without capabilities, and nothing is published
on the host. What a node trains is not known here: a cluster starts commands and injects faults.
"""

import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from apt import need
from machines import UNPRIVILEGED, Machine, Machines, command
from oracle import AHEAD_S
from supervised import remove

from elastic.agent.worker_process import ForkServerClient, Process
from elastic.system.fork_protocol import StartRequest

SHARED = "/mnt/shared"
SCRATCH = "/mnt/scratch"  # a machine's own disk
ENTER = Path(__file__).parent / "enter.py"
CLOCK = Path(__file__).parent / "clock.c"
FIRST = {"n": 10, "e": 100}  # in the subnet: nodes, etcd's members
MOVE = 30  # of one pod to the next of its name
COMMAND = (str(Path(sys.prefix).resolve() / "bin" / "python"), "-m", "elastic.cli")
END_S = 240.0
POLL_S = 0.02


@dataclass(slots=True, kw_only=True)
class Launch:
    """One start of the command on a machine. A node that is started again has another one.

    pid: on this machine, not in the node's own process namespace.
    """

    node: str
    process: Process | subprocess.Popen[bytes]
    printed: Path
    pid: int


class Cluster(ExitStack):
    """At the end of the block all machines are gone.

    name: what all that is made here begins with (supervised.py).
    warm: the process of `enter.py`, which nodes are forked from.
    shares_run: the nodes share the folder `run`; else each starts in a folder of its own.
    gateway: the address of this machine in the nodes' network.
    shared: folder that all nodes see as SHARED. node_files: what nodes print, and their own disks.
    """

    def __init__(self, name: str, warm: ForkServerClient, *, shares_run: bool) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="cluster-"))
        self.callback(remove, self.folder)
        self.machines = Machines(name, self.folder)
        self.callback(self.machines.close)
        self.shared, self.node_files = self.folder / "shared", self.folder / "nodes"
        self.launches: list[Launch] = []
        self._warm = warm
        self._start_folder = SHARED if shares_run else SCRATCH
        for folder in (self.shared, self.node_files, *([self.shared / "run"] if shares_run else [])):
            give(folder)
        self._subnet = self.machines.open()
        self.gateway = self._subnet[1]

    # Starting.

    @property
    def nodes(self) -> list[str]:
        """In the order in which they were started."""
        return list(dict.fromkeys(launch.node for launch in self.launches))

    def make(self, *names: str, **how: Any) -> None:
        """Machines, which are idle unless `words` says what their first processes do."""
        self.machines.make(*(self._machine(name, **how) for name in names))

    def start(self, node: str, words: Sequence[str], env: Mapping[str, str]) -> None:
        """Run `elastic-train WORDS` on the machine, whose name is also its host name."""
        name = f"{node}-{len(self.launches)}"
        printed, told = self.node_files / f"{name}.log", self.node_files / f"{name}.pid"
        how = {
            "ENTER_CONTAINER": str(self.machines.pid(node)),
            "ENTER_TELL": str(told),
            "ENTER_USER": str(UNPRIVILEGED),
            "ENTER_FOLDER": self._start_folder,
        }
        with printed.open("xb") as out:
            request = StartRequest(command=(str(ENTER), *words), env={**env, **how})
            process = self._warm.start(request, (out.fileno(), out.fileno()))
        while not told.exists():
            if process.poll() is not None:
                raise RuntimeError(f"expected a process in {node}, found: {printed.read_text()}")
            time.sleep(POLL_S)
        self.launches.append(Launch(node=node, process=process, printed=printed, pid=int(told.read_text())))

    def again(self, node: str, words: Sequence[str], env: Mapping[str, str], *, elsewhere: bool) -> None:
        """The same machine, with its address and its disk. elsewhere: of pods."""
        self.machines.revive(node)
        self.start(node, words, env)

    def address(self, name: str) -> IPv4Address:
        """Of a node (n1, n2, ...), or a member of etcd (e1, ...)."""
        return self._subnet[FIRST[name[0]] + int(name[1:]) - 1]

    def scratch(self, name: str) -> Path:
        """A machine's own disk, which it sees as SCRATCH."""
        return self.node_files / f"scratch-{name}"

    # Faults.

    def terminate(self, *nodes: str) -> None:
        """SIGTERM to each node's agent."""
        for node in nodes:
            os.kill(self.newest_launch(node).pid, signal.SIGTERM)

    def cut(self, node: str, *chains: str) -> None:
        """Drop packets silently from now on: incoming ones with INPUT, outgoing ones with OUTPUT.

        Packets on the node's loopback interface still pass.
        """
        for chain in chains:
            flag = {"INPUT": "-i", "OUTPUT": "-o"}[chain]
            rule = ("-A", chain, "!", flag, "lo", "-j", "DROP")
            self.machines.inside(node, ["net"], "iptables", "--wait", *rule)

    def heal(self, node: str) -> None:
        self.machines.inside(node, ["net"], "iptables", "--wait", "-F")

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

        Raises TimeoutError after END_S.
        """
        deadline = time.monotonic() + END_S
        while any(launch.process.poll() is None for launch in launches):
            if time.monotonic() > deadline:
                names = ", ".join(launch.node for launch in launches)
                raise TimeoutError(
                    f"expected {names} to end within {END_S:.0f} s, found {', '.join(self.running())} running"
                )
            time.sleep(POLL_S)
        return [code for launch in launches if (code := launch.process.poll()) is not None]

    def _machine(self, name: str, **how: Any) -> Machine:
        give(self.scratch(name))
        folders = {self.shared: SHARED, self.scratch(name): SCRATCH}
        return Machine(name=name, address=str(self.address(name)), folders=folders, **how)


class Pods(Cluster):
    """Each agent is the first process of its container, as a kubelet starts it.

    Nothing reaps its orphans, a signal for which it has no handler does not reach it, and the image
    cannot be written to. A pod that comes back has its name and an empty disk, and may have another
    address. The kubelet's part is played: containers, signals, names. The API server, the scheduler
    and controllers are not.
    """

    def make(self, *names: str, **how: Any) -> None:
        """A pod's container begins with its agent."""
        self._moves: Counter[str] = Counter()

    def address(self, name: str) -> IPv4Address:
        return super().address(name) + MOVE * self._moves[name]

    def start(self, node: str, words: Sequence[str], env: Mapping[str, str]) -> None:
        printed = self.shared / f"printed-{node}-{len(self.launches)}"
        # The image's home cannot be written to.
        variables = [f"{name}={value}" for name, value in (*env.items(), ("HOME", "/"))]
        # Each of these programs becomes the next one, so that the agent is process 1.
        script = f'cd {SHARED} && exec "$@" >{SHARED}/{printed.name} 2>&1'
        whole = ("env", *variables, "sh", "-c", script, "sh", *COMMAND, *words)
        self.machines.make(self._machine(node, words=whole, is_pod=True))
        # The exit code of the container is that of a process which waits for it.
        waits = f"exit $(docker wait {self.machines.container(node)} || echo 255)"
        process = subprocess.Popen(["sh", "-c", waits])
        pid = self.machines.pid(node)
        self.launches.append(Launch(node=node, process=process, printed=printed, pid=pid))

    def again(self, node: str, words: Sequence[str], env: Mapping[str, str], *, elsewhere: bool) -> None:
        """Once the container has ended it is started with an empty disk."""
        self.wait(self.newest_launch(node))  # whose address it is until then
        self._moves[node] += elsewhere
        shutil.rmtree(self.scratch(node))
        self.start(node, words, env)

    def execute(self, node: str, *words: str) -> None:
        """`elastic-train WORDS` beside the agent, as an exec probe. Raises RuntimeError."""
        self.machines.execute(node, *COMMAND, *words)


class WallClocks:
    """The wall clocks of nodes whose processes preload clock.c: each can be put an hour ahead or a
    day back, and the monotonic clocks stay as they are. `jumps`: what each of them did.
    """

    def __init__(self, shared: Path) -> None:
        """Raises NotAvailable where there is no compiler."""
        need("cc", "build-essential")
        self._shared = shared
        command("cc", "-O2", "-shared", "-fPIC", "-o", str(shared / "clock.so"), str(CLOCK))
        self.jumps: defaultdict[str, set[str]] = defaultdict(set)

    def env(self, node: str) -> dict[str, str]:
        """A machine that starts again has the clock that it had."""
        if not self._ahead(node).exists():
            self._ahead(node).write_bytes(struct.pack("=q", 0))
        return {"LD_PRELOAD": f"{SHARED}/clock.so", "CLOCK_AHEAD_S": f"{SHARED}/{self._ahead(node).name}"}

    def jump(self, node: str, how: str) -> None:
        # Written in place, because the node's processes have the file mapped.
        with self._ahead(node).open("r+b") as file:
            file.write(struct.pack("=q", AHEAD_S[how]))
        self.jumps[node].add(how)

    def _ahead(self, node: str) -> Path:
        return self._shared / f"clock-{node}"


def give(folder: Path) -> None:
    """Make the folder, for the user that the nodes run as."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)
