"""A group of nodes on this machine ends with all its processes, in whatever session they are.

The group knows nothing about the launchers that benchmarks/recovery.py compares. It reads only the
recipes' own records: a line "step,time,rank,pid,world size" for each step that a rank finished. A
step is new if no worker finished it before the last fault.
"""

import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

MARK = "RECOVERY_NODE"  # in the environment of everything that a node starts
POLL_S = 0.01
SETTLED_STEPS = 5

T = TypeVar("T")


class NotRecovered(Exception):  # noqa: N818 - a result, not an error
    """The group did not reach a state within the limit; the message says which, and what came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """One of the launchers that are compared.

    command: makes the command of a node from the group's folder, a free port, and the number of
    nodes that were started before.
    spares_first: no fault hits the node that was started first. standbys: of each node, for which a
    fault waits.
    """

    name: str
    command: Callable[[Path, int, int], list[str]]
    env: dict[str, str]
    spares_first: bool
    standbys: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One rank finished one step. time: seconds since 1970."""

    step: int
    time: float
    rank: int
    pid: int
    world_size: int


class Node:
    """One launcher and its descendants, found by a mark in their environment."""

    def __init__(self, command: list[str], env: dict[str, str], printed: Path) -> None:
        mark = uuid.uuid4().hex
        self._mark = f"{MARK}={mark}".encode()
        self.started_s = time.time()
        with printed.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | env | {MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        return [int(path.name) for path in Path("/proc").iterdir() if self._is_mine(path)]

    def _is_mine(self, process: Path) -> bool:
        try:
            return process.name.isdecimal() and self._mark in (process / "environ").read_bytes()
        except OSError:
            return False

    def kill(self, *, limit_s: float = 30.0) -> None:
        """SIGKILL all processes of the node, repeatedly: one may fork between listing and kill."""
        deadline_s = time.monotonic() + limit_s
        while (pids := self.pids()) and time.monotonic() < deadline_s:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        assert not pids, f"processes that SIGKILL does not end within {limit_s:.0f} s: {pids}"
        self.process.wait()


class Group:
    """nodes: those that should be running. `_retired`: pids of the workers from before the last
    fault.
    """

    def __init__(self, launcher: Launcher, folder: Path, limit_s: float, rng: random.Random) -> None:
        folder.mkdir()
        self.launcher = launcher
        self.folder = folder
        self.limit_s = limit_s
        self.rng = rng
        self.nodes: list[Node] = []
        self._started: list[Node] = []
        self._retired: set[int] = set()
        self._lines: list[Line] = []
        (folder / "steps").touch()
        self._unread = (folder / "steps").open("rb")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    def start_node(self) -> None:
        command = self.launcher.command(self.folder, self._port, len(self.nodes))
        env = self.launcher.env | {"STEPS_LOG": str(self.folder / "steps")}
        node = Node(command, env, self.folder / f"node-{len(self._started)}.log")
        self.nodes.append(node)
        self._started.append(node)

    def take_victim(self) -> Node:
        return self.nodes.pop(-1 if self.launcher.spares_first else self.rng.randrange(len(self.nodes)))

    def close(self) -> None:
        for node in self._started:
            node.kill()
        self._unread.close()

    # The records of the workers.

    def lines(self) -> list[Line]:
        while (text := self._unread.readline()).endswith(b"\n"):
            step, time_s, rank, pid, world_size = text.split(b",")
            line = Line(
                step=int(step), time=float(time_s), rank=int(rank), pid=int(pid), world_size=int(world_size)
            )
            self._lines.append(line)
        self._unread.seek(-len(text), os.SEEK_CUR)
        return self._lines

    def worker_of_rank(self, rank: int) -> int:
        return [line.pid for line in self.lines() if line.rank == rank][-1]

    def high(self) -> int:
        """The last step that a retired worker finished."""
        return max((line.step for line in self.lines() if line.pid in self._retired), default=0)

    def new(self, world_size: int | None = None) -> list[Line]:
        """The records of new steps. world_size: only steps of a group of this size."""
        high, sizes = self.high(), (None, world_size)
        return [
            line
            for line in self.lines()
            if line.pid not in self._retired
            and line.step > high
            and (world_size is None or line.world_size in sizes)
        ]

    def lost_steps(self) -> int:
        """The number of steps that retired workers had finished and that were trained again."""
        resumed = min(line.step for line in self.lines() if line.pid not in self._retired)
        return max(0, self.high() + 1 - resumed)

    def pause_s(self, first: Line) -> float:
        """Seconds from the last step of the retired workers to this one, less the duration of a
        step.
        """
        return first.time - max(x.time for x in self.lines() if x.pid in self._retired) - self.step_s()

    def step_s(self) -> float:
        """The median duration of a step so far, in seconds."""
        last_s: dict[int, float] = {}
        taken_s = []
        for line in self.lines():
            if line.pid in last_s:
                taken_s.append(line.time - last_s[line.pid])
            last_s[line.pid] = line.time
        return statistics.median(taken_s)

    # Waiting.

    def wait_for(self, condition: Callable[[], T], what: str) -> T:
        """The first true value of `condition`.

        Raises NotRecovered after the limit, or when no launcher is left.
        """
        deadline_s = time.monotonic() + self.limit_s
        while not (value := condition()):
            codes = [node.process.poll() for node in self.nodes]
            if None not in codes:
                raise NotRecovered(f"job died ({', '.join(map(str, codes))}) without {what}")
            if time.monotonic() > deadline_s:
                raise NotRecovered(f"not {what} within {self.limit_s:.0f} s")
            time.sleep(POLL_S)
        return value

    def begin_fault(self) -> float:
        """Wait until all nodes train, then for a random part of a step, and retire all present
        workers.

        Returns the time, in seconds since 1970.
        """
        size = len(self.nodes)
        self.wait_for(
            lambda: len({line.step for line in self.new(size)}) >= SETTLED_STEPS,
            f"{size} workers at work",
        )
        self.wait_for(lambda: self._standbys() >= size * self.launcher.standbys, "standbys")
        time.sleep(self.rng.uniform(0, self.step_s()))
        self._retired = {line.pid for line in self.lines()}
        return time.time()

    def _standbys(self) -> int:
        """How many wait for an assignment."""
        if not self.launcher.standbys:
            return 0
        words = [sys.executable, "-m", "elastic.cli", "status", str(self.folder / "run"), "--json"]
        return int(json.loads(subprocess.run(words, capture_output=True, check=True).stdout)["standbys"])

    def first_new(self, world_size: int | None = None) -> Line:
        return self.wait_for(lambda: self.new(world_size), "a new step")[0]

    def ended(self, nodes: list[Node]) -> float:
        """Wait until no process of these nodes is left; returns the time."""
        deadline_s = time.monotonic() + self.limit_s
        while any(node.process.poll() is None or node.pids() for node in nodes):
            if time.monotonic() > deadline_s:
                raise NotRecovered(f"processes were left {self.limit_s:.0f} s after SIGTERM")
            time.sleep(POLL_S)
        return time.time()
