"""Nodes are pods: each agent is the first process of its container, as a kubelet starts it.

Nothing reaps its orphans, a signal for which it has no handler does not reach it, and the image
cannot be written to. A pod that comes back has its name and an empty disk, and may have another
address. The kubelet's part is played: containers, signals, names. The API server, the scheduler
and controllers are not.
"""

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address
from pathlib import Path

from cluster import SHARED, Cluster, Launch
from containers import Containers

COMMAND = (str(Path(sys.prefix).resolve() / "bin" / "python"), "-m", "elastic.cli")
# Of one pod to the next of its name, in the subnet.
STEP = 30


class PodCluster(Cluster):
    def make(self, count: int) -> None:
        """A pod's container begins with its agent."""
        self._moves: Counter[str] = Counter()

    def address(self, name: str) -> IPv4Address:
        return super().address(name) + STEP * self._moves[name]

    def start(self, node: str, words: Sequence[str], env: Mapping[str, str], *, is_cold: bool) -> None:
        printed = self.shared / f"printed-{node}-{len(self.launches)}"
        # The image's home cannot be written to.
        variables = [f"{name}={value}" for name, value in (*env.items(), ("HOME", "/"))]
        # Each of these programs becomes the next one, so that the agent is process 1.
        script = f'cd {SHARED} && exec "$@" >{SHARED}/{printed.name} 2>&1'
        whole = ("env", *variables, "sh", "-c", script, "sh", *COMMAND, *words)
        self._containers.make([self._machine(node, words=whole, has_init=False)])
        pid = self._containers.pid(node)
        # The exit code of the container is that of a process which waits for it.
        process = subprocess.Popen(["sh", "-c", f"exit $({self._containers.wait_command(node)} || echo 255)"])
        self.launches.append(Launch(node=node, process=process, printed=printed, pid=pid))

    def start_again(self, node: str, words: Sequence[str], env: Mapping[str, str], *, is_cold: bool) -> None:
        """The container is restarted when it has ended: with its address, and an empty disk."""
        self.wait([self.newest_launch(node)])
        self._containers.remove(node)
        shutil.rmtree(self.scratch(node))
        self.start(node, words, env, is_cold=is_cold)

    def move(self, node: str) -> None:
        """The pod was evicted, and another one of its name will run on another machine."""
        self.wait([self.newest_launch(node)])  # whose address it is until then
        self._moves[node] += 1

    def execute(self, node: str, *words: str) -> None:
        """`elastic-train WORDS` beside the agent, as an exec probe. Raises RuntimeError."""
        self._containers.execute(node, *COMMAND, *words)

    @property
    def _containers(self) -> Containers:
        assert isinstance(self.machines, Containers), "run.py leaves cases with pods out where none can run"
        return self.machines
