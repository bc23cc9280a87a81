"""Two hundred processes of one run get SIGKILL at random moments; the run must end with the digest of the run that nobody disturbed.

python benchmarks/soak.py [--kills 200] [--seed 1] [--folder DIR]

Two nodes of two workers on this machine. Most kills hit a worker, the others a warm parent, an uploader, or a whole node, which is then started again. Between two kills lies
a random time, so some hit the recovery from the one before. It exits 1 where the run fails, ends with another digest, or a recovery lost more than one finished step.
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
VICTIMS = {"worker": 14, "warm parent": 2, "uploader": 2, "node": 2}
UPLOADER = "elastic.uploader.main"
COLD = "elastic.worker.main"
NODES, WORKERS = 2, 2
LIMIT_S = 3600.0
PAUSES_S = (0.1, 3.0)  # four workers on two cores need about a second to their first step


def events(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in folder.glob("run/events/*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # a line that was being written when its process was killed
                continue
    return sorted(found, key=lambda event: event["time"])


class Soak:
    options: tuple[str, ...] = ()  # further ones of each node

    def __init__(self, folder: Path, epochs: int, seed: int) -> None:
        self.folder = folder
        self.epochs = epochs
        self.draw = random.Random(seed)  # noqa: S311 - it chooses victims
        self.agents: list[subprocess.Popen[bytes]] = []
        self.struck: Counter[str] = Counter()

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

    def strike(self) -> None:
        for agent in [agent for agent in self.agents if agent.poll() is not None]:
            # It was struck before it had begun, where a scheduler would start it again.
            self.agents.remove(agent)
            self.start_node()
        kind = self.draw.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        if kind == "node" and len(self.find("worker")) < NODES * WORKERS:
            kind = "worker"  # the death of all nodes at once costs the steps since the checkpoint, and is no case of this test
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
        self.struck[kind] += 1

    def find(self, kind: str) -> list[int]:
        """Processes of this run, by what they are: an agent has an uploader, a warm parent, which has the workers, or workers that started cold."""
        everything = self.processes()
        uploaders = {pid for pid, _, words in everything if UPLOADER in words}
        cold = {pid for pid, _, words in everything if COLD in words}
        agents = {agent.pid for agent in self.agents}
        warm = {pid for pid, parent, _ in everything if parent in agents} - uploaders - cold
        workers = {pid for pid, parent, _ in everything if parent in warm} | cold
        return sorted({"uploader": uploaders, "warm parent": warm, "worker": workers}[kind])

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
        calm, stormy = folder / "calm", folder / "stormy"
        for each in (calm, stormy):
            each.mkdir(parents=True)
        return soak(args, calm, stormy)


def soak(args: argparse.Namespace, calm: Path, stormy: Path) -> int:
    run = Soak(stormy, args.epochs, args.seed)
    began_at = time.monotonic()
    try:
        for _ in range(NODES):
            run.start_node()
        while not any(event["event"] == "first_step" for event in events(stormy)) and not run.is_over():
            time.sleep(0.1)
        while sum(run.struck.values()) < args.kills and not run.is_over():
            time.sleep(run.draw.uniform(*PAUSES_S))
            run.strike()
            print(f"\r{sum(run.struck.values())} kills", end="", flush=True)
        print(f"\r{dict(run.struck)} in {time.monotonic() - began_at:.0f} s; now the run may end", flush=True)
        while not run.is_over() and time.monotonic() - began_at < LIMIT_S:
            time.sleep(0.5)
        for agent in run.agents:
            agent.wait(60)
    finally:
        run.close()
    undisturbed = Soak(calm, args.epochs, args.seed)
    try:
        undisturbed.start_node()
        undisturbed.agents[0].wait(LIMIT_S)
    finally:
        undisturbed.close()
    return judge(args, run, calm, stormy)


def judge(args: argparse.Namespace, run: Soak, calm: Path, stormy: Path) -> int:
    lost = [e["lost_steps"] for e in events(stormy) if e["event"] == "restored"]
    recoveries = Counter(e["source"] for e in events(stormy) if e["event"] == "restored")
    kills = sum(run.struck.values())
    print(f"{kills} kills, {len(lost)} starts of a generation, states from {dict(recoveries)}")
    print(f"finished steps lost: {sum(lost)} in all, {max(lost, default=0)} at most in one recovery")
    print(f"digest      {digest(stormy)}\nundisturbed {digest(calm)}")
    is_good = digest(stormy) == digest(calm) and max(lost, default=0) <= 1 and kills >= args.kills
    print("as promised" if is_good else "NOT as promised")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
