"""Many real agents on this machine, each with one worker that does nothing.

python benchmarks/agents.py [--nodes 24] [--backend dir c10d] [--keep-alive S] [--limit S]
    [--json FILE]

All agents start at once; one is killed; one joins; all are told to leave. Times count from the
event until a worker of the new generation runs on each node, the keep-alive included, or until all
agents have ended. The agents are forked from a process that has imported torch. On a machine with
fewer cores than agents the times are those of the processors, and say little of the protocol:
benchmarks/scale.py measures that.
"""

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from elastic import cli
from elastic.config import interpreter

SCRIPT = Path(__file__).with_name("idle_script.py")
POLL_S = 0.02


class TookTooLong(Exception):  # noqa: N818 - a result, not an error
    """The message says what did not happen within the limit."""


@dataclass
class Machine:
    """All agents of one run, by pid, in the order in which they were started."""

    folder: Path
    options: list[str]
    limit_s: float
    pids: list[int] = field(default_factory=list)

    def start(self, count: int) -> None:
        for _ in range(count):
            pid = os.fork()
            if not pid:
                self._become_agent()
            self.pids.append(pid)

    def _become_agent(self) -> None:
        os.setsid()
        out = os.open(self.folder / f"agent-{os.getpid()}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(out, stream)
        os.environ |= {"AGENTS_LOG": str(self.folder / "lines"), "OMP_NUM_THREADS": "1"}
        sys.argv = [
            "elastic-train",
            str(SCRIPT),
            "--rehearse",
            "off",
            "--run-dir",
            str(self.folder / "run"),
            *self.options,
        ]
        cli.command()

    def runs(self, size: int, since_s: float) -> Callable[[], bool]:
        """Whether a worker of a generation of `size` nodes began on each of them."""

        def holds() -> bool:
            path = self.folder / "lines"
            lines = [line.split(",") for line in path.read_text().splitlines()] if path.exists() else []
            ranks = {rank for at, rank, world, _ in lines if float(at) >= since_s and int(world) == size}
            return len(ranks) == size

        return holds

    def are_gone(self) -> bool:
        for pid in [*self.pids]:
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.pids.remove(pid)
        return not self.pids

    def terminate(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGTERM)

    def last_words(self) -> str:
        """The last line that each agent printed, for a run that did not end."""
        return "\n".join(path.read_text().strip()[-200:] for path in sorted(self.folder.glob("agent-*.log")))

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + self.limit_s
        while not condition():
            if time.monotonic() > until_s:
                raise TookTooLong(f"not {what} within {self.limit_s:.0f} s")
            time.sleep(POLL_S)

    def close(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)  # its own processes end with it
            os.waitpid(pid, 0)


def measure(machine: Machine, nodes: int) -> dict[str, Any]:
    """Seconds of each event. Raises TookTooLong."""
    found: dict[str, Any] = {}

    def event(name: str, act: Callable[[], object], size: int) -> None:
        began_s, began = time.time(), time.monotonic()
        act()
        machine.wait(machine.runs(size, began_s) if size else machine.are_gone, name)
        found[name] = round(time.monotonic() - began, 2)

    def kill() -> None:
        pid = machine.pids.pop(nodes // 2)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    event("all start", lambda: machine.start(nodes), nodes)
    event("one killed", kill, nodes - 1)
    event("one joins", lambda: machine.start(1), nodes)
    event("all leave", machine.terminate, 0)
    events = [json.loads(line) for path in machine.folder.glob("run/events/*.jsonl") for line in path.open()]
    found["generations"] = max(each["generation"] for each in events)
    found["restarts"] = max(each.get("restarts", 0) for each in events)
    return found


def run(backend: str, args: argparse.Namespace) -> dict[str, Any]:
    options = ["--max-nodes", str(args.nodes), "--last-call", "10min", "--nproc-per-node", "1"]
    options += ["--keep-alive", str(args.keep_alive), "--max-restarts", "0", "--local-addr", "127.0.0.1"]
    if backend == "c10d":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free.getsockname()[1]}"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        machine = Machine(Path(folder), options, args.limit)
        load = os.getloadavg()[0]
        try:
            found = measure(machine, args.nodes)
        except TookTooLong as error:
            found = {"error": str(error)}
            print(machine.last_words(), file=sys.stderr)
        finally:
            machine.close()
    return {"backend": backend, "load before": round(load, 1)} | found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--backend", nargs="+", default=["dir", "c10d"], choices=["dir", "c10d"])
    parser.add_argument("--keep-alive", type=float, default=5.0)
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # Each agent would begin again as this program if its interpreter lacked these settings.
    interpreter.restart()
    interpreter.pin_threads()
    import elastic.agent.launch  # noqa: F401 - once, for all agents

    rows = [run(backend, args) for backend in args.backend]
    table = Table(
        title=f"{args.nodes} agents on {os.cpu_count()} cores, keep-alive {args.keep_alive:g} s; seconds"
    )
    names = list(dict.fromkeys(key for row in rows for key in row))
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in names))
    Console(width=140).print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
