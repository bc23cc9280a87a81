"""A run whose processes get SIGKILL two hundred times, at random moments, ends with the undisturbed
digest.

python benchmarks/soak.py [--kills 200] [--seed 1] [--folder DIR]

Two nodes of two workers train on this machine. Most kills hit a worker; the others hit a fork
server, an uploader, or a whole node, which is then started again. The time between kills is random,
so some hit the recovery from the kill before. Exit 1: the run failed, ended with another digest, or
lost more than one finished step in a recovery.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
MARK = "ELASTIC_SOAK"
VICTIMS = {"worker": 14, "fork server": 2, "uploader": 2, "node": 2}
UPLOADER = "elastic.uploader.main"
SPAWNED = "elastic.worker.main"
NODES, WORKERS = 2, 2
LIMIT_S = 3600.0
PAUSES_S = (0.1, 3.0)  # four workers on two cores need about a second to their first step


def events(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in folder.glob("run/events/*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # an unfinished line of a process that was killed
                continue
    return sorted(found, key=lambda event: event["time"])


class Soak:
    options: tuple[str, ...] = ()  # further options of each node

    def __init__(self, folder: Path, epochs: int, seed: int) -> None:
        self.folder = folder
        self.epochs = epochs
        self.draw = random.Random(seed)  # noqa: S311 - it chooses victims
        self.agents: list[subprocess.Popen[bytes]] = []
        self.kills_by_kind: Counter[str] = Counter()

    def start_node(self) -> None:
        words = [
            str(BIN / "elastic-train"),
            str(HERE / "soak_recipe.py"),
            "--run-dir",
            str(self.folder / "run"),
        ]
        words += ["--max-nodes", str(NODES), "--nproc-per-node", str(WORKERS), "--max-restarts", "50"]
        words += ["--snapshot-every", "1", "--save-every", "5s", *self.options, "--", str(self.epochs)]
        with (self.folder / "printed").open("ab") as printed:
            node = subprocess.Popen(
                words,
                env=os.environ | {MARK: str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.agents.append(node)

    def kill_one(self) -> None:
        for agent in [agent for agent in self.agents if agent.poll() is not None]:
            # The agent was killed before it had joined; a cluster's scheduler would start it again.
            self.agents.remove(agent)
            self.start_node()
        kind = self.draw.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        if kind == "node" and len(self.find("worker")) < NODES * WORKERS:
            # The loss of all nodes at once costs the steps since the checkpoint, and is no case
            # here.
            kind = "worker"
        if kind == "node":
            node = self.draw.choice([agent for agent in self.agents if agent.poll() is None])
            node.kill()
            node.wait()
            self.agents.remove(node)
            self.start_node()
        else:
            pids = self.find(kind)
            if not pids:
                return
            os.kill(self.draw.choice(pids), signal.SIGKILL)
        self.kills_by_kind[kind] += 1

    def find(self, kind: str) -> list[int]:
        """The pids of this run's processes of one kind.

        The children of an agent are an uploader, a fork server, and spawned workers. The children
        of a fork server are forked workers.
        """
        everything = self.processes()
        uploaders = {pid for pid, _, words in everything if UPLOADER in words}
        spawned = {pid for pid, _, words in everything if SPAWNED in words}
        agents = {agent.pid for agent in self.agents}
        fork_servers = {pid for pid, parent, _ in everything if parent in agents} - uploaders - spawned
        workers = {pid for pid, parent, _ in everything if parent in fork_servers} | spawned
        return sorted({"uploader": uploaders, "fork server": fork_servers, "worker": workers}[kind])

    def processes(self) -> list[tuple[int, int, str]]:
        found = []
        wanted = f"{MARK}={self.folder}".encode()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes():
                    parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append((int(entry.name), parent, words))
            except OSError:  # it ended meanwhile
                continue
        return found

    def is_over(self) -> bool:
        return any(event["event"] == "run_finished" for event in events(self.folder)) or all(
            agent.poll() is not None for agent in self.agents
        )

    def close(self) -> None:
        for pid, _, _ in self.processes():
            os.kill(pid, signal.SIGKILL)


def digest(folder: Path) -> str:
    return next(
        (e["digest"] for e in events(folder) if e["event"] == "run_finished"), "none: it did not finish"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1500, help="of 20 steps")
    parser.add_argument("--folder", type=Path, help="where the runs stay [a temporary folder]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
        for each in (undisturbed, disturbed):
            each.mkdir(parents=True)
        return soak(args, undisturbed, disturbed)


def soak(args: argparse.Namespace, undisturbed: Path, disturbed: Path) -> int:
    run = Soak(disturbed, args.epochs, args.seed)
    began_s = time.monotonic()
    try:
        for _ in range(NODES):
            run.start_node()
        while not any(event["event"] == "first_step" for event in events(disturbed)) and not run.is_over():
            time.sleep(0.1)
        while sum(run.kills_by_kind.values()) < args.kills and not run.is_over():
            time.sleep(run.draw.uniform(*PAUSES_S))
            run.kill_one()
            print(f"\r{sum(run.kills_by_kind.values())} kills", end="", flush=True)
        print(
            f"\r{dict(run.kills_by_kind)} in {time.monotonic() - began_s:.0f} s; now the run may end",
            flush=True,
        )
        while not run.is_over() and time.monotonic() - began_s < LIMIT_S:
            time.sleep(0.5)
        for agent in run.agents:
            agent.wait(60)
    finally:
        run.close()
    reference = Soak(undisturbed, args.epochs, args.seed)
    try:
        reference.start_node()
        reference.agents[0].wait(LIMIT_S)
    finally:
        reference.close()
    return judge(args, run, undisturbed, disturbed)


def judge(args: argparse.Namespace, run: Soak, undisturbed: Path, disturbed: Path) -> int:
    lost = [e["lost_steps"] for e in events(disturbed) if e["event"] == "restored"]
    recoveries = Counter(e["source"] for e in events(disturbed) if e["event"] == "restored")
    kills = sum(run.kills_by_kind.values())
    print(f"{kills} kills, {len(lost)} starts of a generation, states from {dict(recoveries)}")
    print(f"finished steps lost: {sum(lost)} in all, {max(lost, default=0)} at most in one recovery")
    print(f"digest      {digest(disturbed)}\nundisturbed {digest(undisturbed)}")
    is_good = digest(disturbed) == digest(undisturbed) and max(lost, default=0) <= 1 and kills >= args.kills
    print("as promised" if is_good else "NOT as promised")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
