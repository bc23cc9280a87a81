"""Nodes are containers on a network of their own that share one folder; whatever way the block ends, none of them is left.

Faults come from outside: a node cannot prepare for what is done to it here. It does not know what a node is for: it starts commands and does things to them.
Nodes run as an unprivileged user without any capability; nothing is published on the host.
"""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Self

from engine import docker
from image import mounts

from elastic.agent.child import Start
from elastic.agent.nursery import WarmChild, WarmParent

LABEL = "elastic-cluster"
SHARED = "/shared"
UNPRIVILEGED = 1000
ENTER = Path(__file__).parent / "enter.py"
# Of the private range; most home and company networks use others.
SUBNETS = IPv4Network("10.208.0.0/12")
NETWORK_TRIES = 20
FIRST_NODE, FIRST_SERVICE = 10, 100  # in the subnet
END_S = 240.0
LOOK_S = 0.02
IDLE = ("sleep", "infinity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`memory_mib`: what one node may use before the kernel kills it; `volume_mib`: the size of the run's folder. None: no limit."""

    memory_mib: int | None = None
    volume_mib: int | None = None


@dataclass(slots=True, kw_only=True)
class Life:
    """One command in one container; a node that is started again begins another."""

    node: str
    process: WarmChild
    printed: Path
    pid: int  # on this machine


@dataclass(slots=True)
class Cluster:
    """Use as a context manager. `shared` is the folder that all nodes see as SHARED, and `run` one in it, which may have little room.

    warm: what nodes are forked from, the process of `enter.py`. nodes: so many containers are there, idle, when the block begins.
    """

    image: str
    warm: WarmParent
    containers: int
    limits: Limits = field(default_factory=Limits)
    shared: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="elastic-cluster-")))
    outside: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="elastic-outside-")))
    lives: list[Life] = field(default_factory=list)
    _id: str = field(default_factory=lambda: secrets.token_hex(4))
    _subnet: IPv4Network | None = None
    _is_mounted: bool = False

    def __enter__(self) -> Self:
        try:
            self._make_folders()
            self._make_network()
            with ThreadPoolExecutor() as several:
                list(several.map(self._make_container, range(self.containers)))
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
        return list(dict.fromkeys(life.node for life in self.lives))

    def start(self, words: Sequence[str], env: Mapping[str, str], *, is_cold: bool = False) -> str:
        """Run `elastic-train WORDS` in the next container; gives the node's name, which is also its host name."""
        node = f"n{len(self.nodes) + 1}"
        self._begin(node, words, env, is_cold=is_cold)
        return node

    def start_again(self, node: str, words: Sequence[str], env: Mapping[str, str]) -> None:
        """The same machine, with its address and nothing that ran on it before."""
        docker("restart", "--time", "0", self._name(node))
        self._begin(node, words, env, is_cold=False)

    def serve(self, name: str, place: int, words: Sequence[str], volumes: Sequence[Path] = ()) -> None:
        """Run a program of this machine in a container of its own, reached at `address_of_service(place)`."""
        options = [*self._options(name), "--ip", self.address_of_service(place)]
        for path in volumes:
            options += ["--volume", f"{path}:{path}:ro"]
        docker("run", "--detach", *options, self.image, *words)

    def address(self, node: str) -> str:
        assert self._subnet is not None
        return str(self._subnet[FIRST_NODE + int(node.removeprefix("n")) - 1])

    def address_of_service(self, place: int) -> str:
        assert self._subnet is not None
        return str(self._subnet[FIRST_SERVICE + place])

    # Deeds.

    def kill(self, *names: str) -> None:
        """Machines lose their power, all at once."""
        docker("kill", *map(self._name, names))

    def revive(self, *names: str) -> None:
        """Services begin again with what is on their disks."""
        docker("start", *map(self._name, names))

    def terminate(self, *nodes: str) -> None:
        """SIGTERM to each node's agent."""
        for node in nodes:
            os.kill(self._life(node).pid, signal.SIGTERM)

    def kill_process(self, node: str, pid: int) -> None:
        """One process of a node, by its number in there."""
        docker("exec", self._name(node), "sh", "-c", f"kill -KILL {pid}")

    def pause(self, *names: str) -> None:
        docker("pause", *map(self._name, names))

    def unpause(self, *names: str) -> None:
        docker("unpause", *map(self._name, names))

    def cut(self, node: str, *chains: str) -> None:
        """From now on packets vanish without a word: those that come in with INPUT, those that go out with OUTPUT. What a node says to itself stays."""
        for chain, flag in (("INPUT", "-i"), ("OUTPUT", "-o")):
            if chain in chains:
                self.inside(node, "net", "iptables", "--wait", "-A", chain, "!", flag, "lo", "-j", "DROP")

    def heal(self, node: str) -> None:
        self.inside(node, "net", "iptables", "--wait", "-F")

    def unplug(self, node: str) -> None:
        """The interface disappears, and its connections with it."""
        docker("network", "disconnect", self._network, self._name(node))

    def plug(self, node: str) -> None:
        """Back with the address that it had."""
        docker("network", "connect", "--ip", self.address(node), self._network, self._name(node))

    def inside(self, node: str, namespace: str, *words: str) -> None:
        """A command of this machine, as root, in one namespace (net, mount) of a node. Raises RuntimeError."""
        pid = self._pid(node)
        done = subprocess.run(
            ["nsenter", "--target", str(pid), f"--{namespace}", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(words)} in {node}: exit code {done.returncode}: {done.stderr.strip()}"
            )

    # What is seen.

    def running(self) -> list[str]:
        return [node for node in self.nodes if self._life(node).process.poll() is None]

    def wait(self, lives: Sequence[Life]) -> list[int]:
        """Their exit codes, once all have ended; 137 where the machine did. Raises TimeoutError after END_S."""
        deadline = time.monotonic() + END_S
        while any(life.process.poll() is None for life in lives):
            if time.monotonic() > deadline:
                names = ", ".join(life.node for life in lives)
                raise TimeoutError(
                    f"expected {names} to end within {END_S:.0f} s, found {', '.join(self.running())} running"
                )
            time.sleep(LOOK_S)
        return [code for life in lives if (code := life.process.poll()) is not None]

    # The end.

    def close(self) -> None:
        there = docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}={self._id}", check=False).split()
        if there:
            docker("rm", "--force", "--volumes", *there, check=False)
        docker("network", "rm", self._network, check=False)
        if self._is_mounted:
            subprocess.run(["umount", "--lazy", self.shared / "run"], check=True)
        for folder in (self.shared, self.outside):
            shutil.rmtree(folder, ignore_errors=True)

    def _begin(self, node: str, words: Sequence[str], env: Mapping[str, str], *, is_cold: bool) -> None:
        name = f"{node}-{len(self.lives)}"
        printed, told = self.outside / f"{name}.log", self.outside / f"{name}.pid"
        how = {
            "ENTER_CONTAINER": str(self._pid(node)),
            "ENTER_TELL": str(told),
            "ENTER_USER": str(UNPRIVILEGED),
            "ENTER_FOLDER": SHARED,
        } | ({"ENTER_COLD": "yes"} if is_cold else {})
        with printed.open("xb") as out:
            pid = self.warm.fork(
                Start(words=(str(ENTER), *words), env={**env, **how}, out=out.fileno(), err=out.fileno())
            )
        process = WarmChild(self.warm, pid)
        while not told.exists():
            if process.poll() is not None:
                raise RuntimeError(f"expected a process in {node}, found: {printed.read_text()}")
            time.sleep(LOOK_S)
        self.lives.append(Life(node=node, process=process, printed=printed, pid=int(told.read_text())))

    def _make_folders(self) -> None:
        run = self.shared / "run"
        run.mkdir()
        if self.limits.volume_mib is not None:
            size = f"size={self.limits.volume_mib}m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", run], check=True)
            self._is_mounted = True
        for folder in (self.shared, run):
            folder.chmod(0o755)
            os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)

    def _make_network(self) -> None:
        """Fixed addresses need a subnet of one's own; the engine refuses one that another of its networks has."""
        failure = "nothing tried"
        for _ in range(NETWORK_TRIES):
            start = int(SUBNETS[0]) + 256 * secrets.randbelow(SUBNETS.num_addresses // 256)
            subnet = IPv4Network((start, 24))
            try:
                docker("network", "create", "--subnet", str(subnet), self._network)
            except RuntimeError as error:
                failure = str(error)
                continue
            self._subnet = subnet
            return
        raise RuntimeError(
            f"expected a free subnet in {SUBNETS}, found none in {NETWORK_TRIES} tries: {failure}"
        )

    def _make_container(self, place: int) -> None:
        node = f"n{place + 1}"
        options = [*self._options(node), "--ip", self.address(node), "--workdir", SHARED]
        options += ["--volume", f"{self.shared}:{SHARED}"]
        for folder in mounts():
            options += ["--volume", f"{folder}:{folder}:ro"]
        if self.limits.memory_mib is not None:
            # Without swap: else a node becomes slow instead of being killed.
            size = f"{self.limits.memory_mib}m"
            options += ["--memory", size, "--memory-swap", size]
        docker("run", "--detach", *options, self.image, *IDLE)

    def _options(self, name: str) -> list[str]:
        return [
            *("--name", self._name(name), "--hostname", name, "--label", f"{LABEL}={self._id}"),
            *("--network", self._network, "--user", str(UNPRIVILEGED), "--init", "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges"),
        ]

    def _pid(self, node: str) -> int:
        """Of the container's first process, on this machine."""
        pid = int(docker("inspect", "--format", "{{.State.Pid}}", self._name(node)))
        if not pid:
            raise RuntimeError(f"expected {node} to run, but it has ended")
        return pid

    def _life(self, node: str) -> Life:
        return next(life for life in reversed(self.lives) if life.node == node)

    @property
    def _network(self) -> str:
        return f"elastic-{self._id}"

    def _name(self, node: str) -> str:
        return f"elastic-{self._id}-{node}"
