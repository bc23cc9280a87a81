"""Nodes are machines on a network of their own that share one folder, or no more of it than gates; whatever way the block ends, none of them is left.

Faults come from outside: a node cannot prepare for what is done to it here. It does not know what a node is for: it starts commands and does things to them.
Nodes run as an unprivileged user without any capability; nothing is published on the host.
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
from typing import Self

from machines import IDLE, UNPRIVILEGED, Machine, Machines
from namespaces import outside

from elastic.agent.workers.fork_server_client import ForkedProcess, ForkServerClient
from elastic.agent.workers.process import ProcessStart

SHARED = "/mnt/shared"
SCRATCH = "/mnt/scratch"  # a machine's own disk
ENTER = Path(__file__).parent / "enter.py"
FIRST = {"n": 10, "e": 100, "s": 200}  # in the subnet: nodes, etcd's members, the object store
END_S = 240.0
LOOK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`memory_mib`: what one node may use before the kernel kills it; `volume_mib`: the size of the run's folder. None: no limit."""

    memory_mib: int | None = None
    volume_mib: int | None = None


@dataclass(slots=True, kw_only=True)
class Life:
    """One command in one container; a node that is started again begins another."""

    node: str
    process: ForkedProcess
    printed: Path
    pid: int  # on this machine


@dataclass(slots=True)
class Cluster:
    """Use as a context manager. `shared` is the folder that all nodes see as SHARED, and `run` one in it, which may have little room.

    shares_run: without it there is no such folder, and nodes begin in one of their own.

    warm: what nodes are forked from, the process of `enter.py`. containers: so many machines are there, idle, when the block begins.
    """

    machines: Machines
    warm: ForkServerClient
    containers: int
    limits: Limits = field(default_factory=Limits)
    shares_run: bool = True
    shared: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="elastic-cluster-")))
    outside: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="elastic-outside-")))
    lives: list[Life] = field(default_factory=list)
    _subnet: IPv4Network | None = None
    _is_mounted: bool = False

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
        return list(dict.fromkeys(life.node for life in self.lives))

    def start(self, words: Sequence[str], env: Mapping[str, str], *, is_cold: bool = False) -> str:
        """Run `elastic-train WORDS` on the next machine; gives the node's name, which is also its host name."""
        node = f"n{len(self.nodes) + 1}"
        self._begin(node, words, env, is_cold=is_cold)
        return node

    def start_again(self, node: str, words: Sequence[str], env: Mapping[str, str]) -> None:
        """The same machine, with its address and its disk."""
        self.machines.revive(node)
        self._begin(node, words, env, is_cold=False)

    def serve(self, services: Mapping[str, Sequence[str]], programs: tuple[Path, ...] = ()) -> None:
        """Commands on machines of their own, at `address(name)`; `programs`: of this machine, which they need beside its virtual environment."""
        self.machines.make(
            [self._machine(name, words=tuple(words), programs=programs) for name, words in services.items()]
        )

    def address(self, name: str) -> str:
        """Of a node, n1 and so on, or of a service, e1 and so on, s1."""
        assert self._subnet is not None
        return str(self._subnet[FIRST[name[0]] + int(name[1:]) - 1])

    def scratch(self, name: str) -> Path:
        """A machine's own disk, SCRATCH in there."""
        return self.outside / f"scratch-{name}"

    # Deeds.

    def terminate(self, *nodes: str) -> None:
        """SIGTERM to each node's agent."""
        for node in nodes:
            os.kill(self._life(node).pid, signal.SIGTERM)

    def kill_process(self, node: str, pid: int) -> None:
        """One process of a node, by its number in there."""
        os.kill(outside(self.machines.pid(node), pid), signal.SIGKILL)

    def cut(self, node: str, *chains: str) -> None:
        """From now on packets vanish without a word: those that come in with INPUT, those that go out with OUTPUT. What a node says to itself stays."""
        for chain, flag in (("INPUT", "-i"), ("OUTPUT", "-o")):
            if chain in chains:
                self.inside(node, ["net"], "iptables", "--wait", "-A", chain, "!", flag, "lo", "-j", "DROP")

    def heal(self, node: str) -> None:
        self.inside(node, ["net"], "iptables", "--wait", "-F")

    def inside(self, node: str, namespaces: Sequence[str], *words: str) -> None:
        """A command, as root, in some namespaces of a node: net, or mount with pid, because mounts are read from /proc. Raises RuntimeError."""
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
        self.machines.close()
        if self._is_mounted:
            subprocess.run(["umount", "--lazy", self.shared / "run"], check=True)
        for folder in (self.shared, self.outside):
            shutil.rmtree(folder, ignore_errors=True)

    def _begin(self, node: str, words: Sequence[str], env: Mapping[str, str], *, is_cold: bool) -> None:
        name = f"{node}-{len(self.lives)}"
        printed, told = self.outside / f"{name}.log", self.outside / f"{name}.pid"
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
            time.sleep(LOOK_S)
        self.lives.append(Life(node=node, process=process, printed=printed, pid=int(told.read_text())))

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
        run.chmod(0o755)
        for folder in (self.shared, run):
            os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)

    def _machine(
        self,
        name: str,
        *,
        words: tuple[str, ...] = IDLE,
        programs: tuple[Path, ...] = (),
        memory_mib: int | None = None,
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
        )

    def _life(self, node: str) -> Life:
        return next(life for life in reversed(self.lives) if life.node == node)
