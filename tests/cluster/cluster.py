"""Nodes are containers on a network of their own that share one folder; whatever way the block ends, none of them is left.

Faults come from outside: a node cannot prepare for what is done to it here. It does not know what a node is for: it starts commands and does things to them.
Nodes run as an unprivileged user without any capability; nothing is published on the host.
"""

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Self

from engine import docker
from image import interpreter, mounts

LABEL = "elastic-cluster"
SHARED = "/shared"
UNPRIVILEGED = 1000
# Of the private range; most home and company networks use others.
SUBNETS = IPv4Network("10.208.0.0/12")
NETWORK_TRIES = 20
END_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`memory_mib`: what one node may use before the kernel kills it; `volume_mib`: the size of the shared folder. None: no limit."""

    memory_mib: int | None = None
    volume_mib: int | None = None


class Cluster:
    """Use as a context manager. `shared` is the folder that all nodes see as SHARED."""

    def __init__(self, image: str, limits: Limits | None = None) -> None:
        self._image = image
        self._limits = limits or Limits()
        self._id = secrets.token_hex(4)
        self._subnet: IPv4Network | None = None
        self._is_mounted = False
        self.shared = Path(tempfile.mkdtemp(prefix="elastic-cluster-"))
        self.nodes: list[str] = []
        self._addresses: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            self._make_folder()
            self._make_network()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Starting.

    def start(self, words: Sequence[str], env: dict[str, str] | None = None) -> str:
        """Run this machine's interpreter with `words` in a new container; gives the node's name, which is also its host name."""
        node = f"n{len(self.nodes) + 1}"
        assert self._subnet is not None
        self._addresses[node] = str(self._subnet[10 + len(self.nodes)])
        options = [
            *("--name", self._name(node), "--hostname", node, "--label", f"{LABEL}={self._id}"),
            *("--network", self._network, "--ip", self._addresses[node]),
            *("--user", str(self._uid), "--init", "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges"),
            *("--volume", f"{self.shared}:{SHARED}", "--workdir", SHARED),
        ]
        for folder in mounts():
            options += ["--volume", f"{folder}:{folder}:ro"]
        for name, value in (env or {}).items():
            options += ["--env", f"{name}={value}"]
        if self._limits.memory_mib is not None:
            # Without swap: else a node becomes slow instead of being killed.
            size = f"{self._limits.memory_mib}m"
            options += ["--memory", size, "--memory-swap", size]
        self.nodes.append(node)
        docker("run", "--detach", *options, self._image, str(interpreter()), *words)
        return node

    # Deeds.

    def signal(self, name: str, *nodes: str) -> None:
        """To the first process of each node, all at once where there are several; KILL ends all of its processes."""
        docker("kill", "--signal", name, *map(self._name, nodes))

    def signal_process(self, name: str, node: str, pid: int) -> None:
        """To one process of a node, by its number in there."""
        docker("exec", self._name(node), "sh", "-c", f"kill -{name} {pid}")

    def pause(self, *nodes: str) -> None:
        docker("pause", *map(self._name, nodes))

    def unpause(self, *nodes: str) -> None:
        docker("unpause", *map(self._name, nodes))

    def cut(self, node: str, *chains: str) -> None:
        """From now on packets vanish without a word: those that come in with INPUT, those that go out with OUTPUT. What a node says to itself stays."""
        for chain, flag in (("INPUT", "-i"), ("OUTPUT", "-o")):
            if chain in chains:
                self._iptables(node, "-A", chain, "!", flag, "lo", "-j", "DROP")

    def heal(self, node: str) -> None:
        self._iptables(node, "-F")

    def unplug(self, node: str) -> None:
        """The interface disappears, and its connections with it."""
        docker("network", "disconnect", self._network, self._name(node))

    def plug(self, node: str) -> None:
        """Back with the address that it had."""
        docker("network", "connect", "--ip", self._addresses[node], self._network, self._name(node))

    # What is seen.

    def running(self) -> list[str]:
        names = docker(
            *("ps", "--filter", f"label={LABEL}={self._id}", "--filter", "status=running"),
            *("--filter", "status=paused", "--format", "{{.Names}}"),
        ).split()
        return [node for node in self.nodes if self._name(node) in names]

    def wait(self, *nodes: str) -> dict[str, int]:
        """Exit codes of these nodes, once all have ended. Raises TimeoutError after END_S."""
        try:
            codes = docker("wait", *map(self._name, nodes), timeout_s=END_S).split()
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"expected {', '.join(nodes)} to end within {END_S:.0f} s, found {', '.join(self.running())} running"
            ) from None
        return dict(zip(nodes, map(int, codes), strict=True))

    def log(self, node: str, lines: int = 40) -> str:
        """The end of what a node printed, both streams."""
        done = subprocess.run(
            ["docker", "logs", "--tail", str(lines), self._name(node)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        return done.stdout

    # The end.

    def close(self) -> None:
        there = docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}={self._id}", check=False).split()
        if there:
            docker("rm", "--force", "--volumes", *there, check=False)
        docker("network", "rm", self._network, check=False)
        if self._is_mounted:
            subprocess.run(["umount", "--lazy", self.shared], check=True)
        shutil.rmtree(self.shared, ignore_errors=True)

    def _make_folder(self) -> None:
        if self._limits.volume_mib is not None:
            size = f"size={self._limits.volume_mib}m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", self.shared], check=True)
            self._is_mounted = True
        self.shared.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(self.shared, self._uid, self._uid)

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

    def _iptables(self, node: str, *words: str) -> None:
        pid = docker("inspect", "--format", "{{.State.Pid}}", self._name(node))
        if pid == "0":
            raise RuntimeError(
                f"expected {node} to run when its packets are to be dropped or let through, but it has ended"
            )
        words = ("nsenter", "--target", pid, "--net", "iptables", "--wait", *words)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}")

    @property
    def _network(self) -> str:
        return f"elastic-{self._id}"

    def _name(self, node: str) -> str:
        return f"elastic-{self._id}-{node}"

    @property
    def _uid(self) -> int:
        """Root's files would be root's; an unprivileged caller's nodes are himself."""
        return UNPRIVILEGED if os.geteuid() == 0 else os.geteuid()
