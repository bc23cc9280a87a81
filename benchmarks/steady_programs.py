"""A training program that is stopped and goes on as if nothing had been, to train in turns.

All its processes are stopped (SIGSTOP), the lowest first. Its rank 0 writes a line after each step.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import processes
from paired_turns import Turn, is_disturbed, whole_steps
from steady_cells import Cell, Side

from elastic.config.environment import MALLOC
from elastic.config.run_dir import RunDir
from elastic.events import WorkerStarted
from elastic.observe.log import read_events
from elastic.observe.logged_event import of_kind
from elastic.system.growing_file import GrowingFile

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
POLL_S = 0.02
LIMIT_S = 240.0  # of a wait for steps


class Ended(Exception):  # noqa: N818 - a result, not an error
    """The program ended, did not go on, or lost steps. The message has what it printed."""


class StepEnds:
    """When each step ended, in seconds since 1970, from a file that grows."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._steps: list[int] = []
        self.device_bytes = 0  # the most that tensors took on the GPU
        self.ends_s: list[float] = []

    def read(self) -> int:
        """What is new in it. Returns the newest step, or 0."""
        for line in self._file.lines_to_end():
            record = json.loads(line)
            self._steps.append(record["step"])
            self.ends_s.append(record["time"])
            self.device_bytes = record.get("device_bytes", 0)
        return self._steps[-1] if self._steps else 0

    @property
    def is_disturbed(self) -> bool:
        return is_disturbed(self._steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What starts a program, and where the lines of its steps will be."""

    side: Side
    workers: int
    words: list[object]
    folder: Path
    lines: Path


def command(side: Side, cell: Cell, folder: Path) -> Command:
    """folder: an empty one, for what the program writes."""
    shards = cell.workers * cell.shards
    lines = folder / ("run/metrics.jsonl" if side is Side.OURS else "metrics.jsonl")
    plain = [HERE / "steady_plain.py", cell.model, cell.shards, cell.precision, lines]
    words: list[object]
    match side:
        case Side.OURS:
            words = [
                BIN / "elastic-train",
                HERE / "steady_ours.py",
                "--rehearse",
                "off",
                "--run-dir",
                folder / "run",
            ]
            words += ["--nproc-per-node", cell.workers, "--save-every", "1000000steps"]
            # Snapshots lie in memory that the worker shares with its agent, and would count.
            words += ["--snapshot-every", "off"] if cell.is_of_memory else []
            words += ["--", cell.model, shards, cell.precision]
        case Side.PLAIN:
            words = [sys.executable, *plain]
        case Side.DDP | Side.FSDP:
            words = [BIN / "torchrun", "--standalone", f"--nproc-per-node={cell.workers}", *plain]
    return Command(side=side, workers=cell.workers, words=words, folder=folder, lines=lines)


def _environment(of: Command) -> dict[str, str]:
    """Ours, without the options of elastic-train that it may have.

    elastic-train has malloc use large pages and keep what is freed, with which any program is
    faster. So the others get that too: a ratio is to show what its loop costs.
    """
    found = {name: value for name, value in os.environ.items() if not name.startswith("ELASTIC_")}
    # Killed programs leave temporary folders behind, which end with this one.
    found |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(of.folder)}
    if of.side is not Side.OURS:
        found["GLIBC_TUNABLES"] = MALLOC
    return found


class Program:
    def __init__(self, started: Command) -> None:
        self.side, self._num_workers = started.side, started.workers
        self.turns: list[Turn] = []
        self.processor_s = 0.0  # of all its processes, in its turns
        self.sent_bytes, self.trained_s = 0, 0.0  # by workers to each other, in its turns
        self._folder, self._printed = started.folder, started.folder / "printed"
        self.ends = StepEnds(started.lines)
        with self._printed.open("w") as out:
            self._process = subprocess.Popen(
                [*map(str, started.words)],
                env=_environment(started),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C is the benchmark's, which ends the programs
            )

    def stop(self) -> None:
        processes.send(processes.family(self._process.pid), signal.SIGSTOP)

    def turn(self, turn_s: float, least_steps: int) -> Turn:
        """Let it train for `turn_s`, and until so many steps lie in the turn whole.

        Raises Ended.
        """
        before_s, sent_bytes = self._processor_s(), processes.sent_bytes()
        processes.send(processes.family(self._process.pid), signal.SIGCONT)
        began_s, until_s = time.time(), time.monotonic() + LIMIT_S
        time.sleep(turn_s)
        self.ends.read()
        while (found := whole_steps(self.ends.ends_s, began_s, time.time())) is None or (
            found.steps < least_steps
        ):
            self.check(until_s)
            time.sleep(POLL_S)
            self.ends.read()
        self.stop()
        self.check(until_s)
        self.processor_s += self._processor_s() - before_s
        self.sent_bytes += processes.sent_bytes() - sent_bytes
        self.trained_s += time.time() - began_s
        if self.ends.is_disturbed:
            raise Ended(f"{self.side.value} did not go on undisturbed:\n{self._last_words()}")
        return found

    def check(self, until_s: float) -> None:
        """Raises Ended where it ended, and after `until_s` on the monotonic clock."""
        if self._process.poll() is not None:
            raise Ended(f"{self.side.value} ended with {self._process.returncode}:\n{self._last_words()}")
        if time.monotonic() > until_s:
            raise Ended(f"{self.side.value} made no steps within {LIMIT_S:.0f} s:\n{self._last_words()}")

    def workers(self) -> list[int]:
        """The processes that train, by pid. Raises Ended if they are not those of the start."""
        found: list[int]
        match self.side:
            case Side.OURS:
                # Those of a second generation would be more.
                events = read_events(RunDir.parse(str(self._folder / "run")).events)
                found = [event.event.pid for event in of_kind(events, WorkerStarted)]
            case Side.PLAIN:
                found = [self._process.pid]
            case Side.DDP | Side.FSDP:
                found = processes.family(self._process.pid)[:-1]
        if len(found) != self._num_workers:
            raise Ended(
                f"{self.side.value}: expected {self._num_workers} workers, found {len(found)}:\n{self._last_words()}"
            )
        return found

    def peak_bytes(self) -> int:
        """Of the worker with the most. Raises Ended."""
        return max(map(processes.peak_bytes, self.workers()))

    def close(self) -> None:
        if self._process.poll() is None:
            processes.end(self._process.pid)
        self._process.wait()

    def _processor_s(self) -> float:
        return sum(map(processes.processor_s, processes.family(self._process.pid)))

    def _last_words(self) -> str:
        return "\n".join(self._printed.read_text(errors="replace").splitlines()[-20:])
