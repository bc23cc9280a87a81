"""However the block ends, no machine of the cluster is left.

Nodes are machines on a network of their own. They share one folder, or nothing but the gates in it.
Faults come from outside, so a node cannot prepare for them. Nodes run as an unprivileged user
without capabilities, and nothing is published on the host. What a node trains is not known here: a
cluster starts commands and injects faults.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Protocol, Self

from disk import Disk
from machines import IDLE, UNPRIVILEGED, Machine, Machines
from namespaces import pid_outside

from elastic.agent.workers.fork_server_client import ForkServerClient
from elastic.agent.workers.process import ProcessStart

SHARED = "/mnt/shared"
SCRATCH = "/mnt/scratch"  # a machine's own disk
ENTER = Path(__file__).parent / "enter.py"
FIRST = {"n": 10, "e": 100, "s": 200}  # in the subnet: nodes, etcd's members, the object store
END_S = 240.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None: no limit.

    memory_mib: of one node; above it the kernel kills a process of the node.
    volume_mib: size of the run's folder.
    disk_mib: size of a disk for the run's folder, whose power can be cut.
    """

    memory_mib: int | None = None
    volume_mib: int | None = None
    disk_mib: int | None = None


class NodeProcess(Protocol):
    def poll(self) -> int | None:
        """The exit code; None while it runs."""


@dataclass(slots=True, kw_only=True)
class Launch:
    """One start of the command on a machine. A node that is started again has another one.

    pid: on this machine, not in the node's own process namespace.
    """

    node: str
    process: NodeProcess
    printed: Path
    pid: int


@dataclass(slots=True)
class Cluster:
    """Use as a context manager.

    warm: the process of `enter.py`, which nodes are forked from.
    containers: number of machines that are there, idle, when the block begins.
    shared: folder that all nodes see as SHARED. Its folder `run` may be of limited size.
    shares_run: if not, there is no folder `run`, and each node starts in a folder of its own.
    node_files: what nodes print, and their own disks.
    """

    machines: Machines
    warm: ForkServerClient
    containers: int
    limits: Limits = field(default_factory=Limits)
    shares_run: bool = True
    shared: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="elastic-cluster-")))
    node_files: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="elastic-node-files-")))
    launches: list[Launch] = field(default_factory=list)
    _subnet: IPv4Network | None = None
    _is_mounted: bool = False
    _disk: Disk | None = None

    def __enter__(self) -> Self:
        try:
            self._make_folders()
            self._subnet = self.machines.open()
            nodes = [f"n{place}" for place in range(1, self.containers + 1)]
            self.machines.make([self._machine(node, memory_mib=self.limits.memory_mib) for node in nodes])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Starting.

    @property
    def nodes(self) -> list[str]:
        """In the order in which they were started."""
        return list(dict.fromkeys(launch.node for launch in self.launches))

    def start(self, words: Sequence[str], env: Mapping[str, str], *, is_cold: bool = False) -> str:
        """Run `elastic-train WORDS` on the next machine.

        Returns the node's name, also its host name.
        """
        node = f"n{len(self.nodes) + 1}"
        self._begin(node, words, env, is_cold=is_cold)
        return node

    def start_again(
        self, node: str, words: Sequence[str], env: Mapping[str, str], *, is_cold: bool = False
    ) -> None:
        """The same machine, with its address and its disk."""
        self.machines.revive(node)
        self._begin(node, words, env, is_cold=is_cold)

    def serve(self, services: Mapping[str, Sequence[str]], programs: tuple[Path, ...] = ()) -> None:
        """Run commands, each on a machine of its own at `address(name)`.

        programs: files of this machine that the commands need besides the virtual environment.
        """
        self.machines.make(
            [self._machine(name, words=tuple(words), programs=programs) for name, words in services.items()]
        )

    def address(self, name: str) -> str:
        """Of a node (n1, n2, ...), a member of etcd (e1, ...), or the object store (s1)."""
        assert self._subnet is not None
        return str(self._subnet[FIRST[name[0]] + int(name[1:]) - 1])

    def scratch(self, name: str) -> Path:
        """A machine's own disk, which it sees as SCRATCH."""
        return self.node_files / f"scratch-{name}"

    # Faults.

    def terminate(self, *nodes: str) -> None:
        """SIGTERM to each node's agent."""
        for node in nodes:
            os.kill(self.newest_launch(node).pid, signal.SIGTERM)

    def kill_process(self, node: str, pid: int) -> None:
        """SIGKILL to one process of a node. pid: in the node's own process namespace."""
        os.kill(pid_outside(self.machines.pid(node), pid), signal.SIGKILL)

    def cut_power(self) -> None:
        """Every node and the disk of the run's folder end now; `start_again` finds what it has."""
        self.machines.kill(*self.running())
        assert self._disk is not None
        self._disk.cut_power()

    def cut(self, node: str, *chains: str) -> None:
        """Drop packets silently from now on: incoming ones with INPUT, outgoing ones with OUTPUT.

        Packets on the node's loopback interface still pass.
        """
        for chain, flag in (("INPUT", "-i"), ("OUTPUT", "-o")):
            if chain in chains:
                self.inside(node, ["net"], "iptables", "--wait", "-A", chain, "!", flag, "lo", "-j", "DROP")

    def heal(self, node: str) -> None:
        self.inside(node, ["net"], "iptables", "--wait", "-F")

    def inside(self, node: str, namespaces: Sequence[str], *words: str) -> None:
        """Run a command as root in some namespaces of a node. Raises RuntimeError if it fails.

        namespaces: `net`; or `mount` together with `pid`, because `umount` reads mounts from /proc.
        """
        done = subprocess.run(
            [
                "nsenter",
                "--target",
                str(self.machines.pid(node)),
                *(f"--{namespace}" for namespace in namespaces),
                *words,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(words)} in {node}: exit code {done.returncode}: {done.stderr.strip()}"
            )

    # Observations.

    def printed(self, node: str) -> str:
        """What its newest start has printed so far."""
        return self.newest_launch(node).printed.read_text(errors="replace")

    def running(self) -> list[str]:
        return [node for node in self.nodes if self.newest_launch(node).process.poll() is None]

    def wait(self, launches: Sequence[Launch]) -> list[int]:
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

    # The end.

    def close(self) -> None:
        self.machines.close()
        if self._is_mounted:
            subprocess.run(["umount", "--lazy", self.shared / "run"], check=True)
        if self._disk is not None:
            self._disk.close()
        for folder in (self.shared, self.node_files):
            shutil.rmtree(folder, ignore_errors=True)

    def _begin(self, node: str, words: Sequence[str], env: Mapping[str, str], *, is_cold: bool) -> None:
        name = f"{node}-{len(self.launches)}"
        printed, told = self.node_files / f"{name}.log", self.node_files / f"{name}.pid"
        how = {
            "ENTER_CONTAINER": str(self.machines.pid(node)),
            "ENTER_TELL": str(told),
            "ENTER_USER": str(UNPRIVILEGED),
            "ENTER_FOLDER": SHARED if self.shares_run else SCRATCH,
        } | ({"ENTER_COLD": "yes"} if is_cold else {})
        with printed.open("xb") as out:
            process = self.warm.fork(
                ProcessStart(
                    command=(str(ENTER), *words), env={**env, **how}, stdout=out.fileno(), stderr=out.fileno()
                )
            )
        while not told.exists():
            if process.poll() is not None:
                raise RuntimeError(f"expected a process in {node}, found: {printed.read_text()}")
            time.sleep(POLL_S)
        self.launches.append(Launch(node=node, process=process, printed=printed, pid=int(told.read_text())))

    def _make_folders(self) -> None:
        self.shared.chmod(0o755)
        if not self.shares_run:
            return
        run = self.shared / "run"
        run.mkdir()
        if self.limits.volume_mib is not None:
            size = f"size={self.limits.volume_mib}m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", run], check=True)
            self._is_mounted = True
        if self.limits.disk_mib is not None:
            self._disk = Disk(run, self.limits.disk_mib)
            self._disk.begin()
        run.chmod(0o755)
        for folder in (self.shared, run):
            os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)
        if self._disk is not None:
            self._disk.sync()

    def _machine(
        self,
        name: str,
        *,
        words: tuple[str, ...] = IDLE,
        programs: tuple[Path, ...] = (),
        memory_mib: int | None = None,
        has_init: bool = True,
    ) -> Machine:
        scratch = self.scratch(name)
        scratch.mkdir()
        os.chown(scratch, UNPRIVILEGED, UNPRIVILEGED)
        return Machine(
            name=name,
            address=self.address(name),
            words=words,
            folders={self.shared: SHARED, scratch: SCRATCH},
            programs=programs,
            memory_mib=memory_mib,
            has_init=has_init,
        )

    def newest_launch(self, node: str) -> Launch:
        return next(launch for launch in reversed(self.launches) if launch.node == node)
