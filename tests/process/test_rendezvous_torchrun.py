"""Plain torchrun agents with our rendezvous: real processes, a real collective, a real SIGKILL."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
folder = Path(sys.argv[1])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
ready = torch.ones(1)
dist.all_reduce(ready)
fifo = os.open(folder / "started", os.O_WRONLY)
os.write(fifo, (json.dumps([dist.get_rank(), int(ready.item()), os.getpid()]) + "\\n").encode())
while ready.item() > 0:
    time.sleep(0.02)
    ready = torch.tensor([0.0 if (folder / "finish").exists() else 1.0])
    dist.all_reduce(ready, dist.ReduceOp.MIN)
dist.destroy_process_group()
"""

Start = tuple[int, int, int]  # rank, world size, pid


class Torchrun:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: list[subprocess.Popen[bytes]] = []
        (folder / "job.py").write_text(SCRIPT)
        os.mkfifo(folder / "started")
        # Open for reading and writing: workers that open it never wait for a reader, and a reader
        # never sees its end.
        self.started = os.fdopen(os.open(folder / "started", os.O_RDWR), "rb")

    def start(self) -> subprocess.Popen[bytes]:
        options = ["--rdzv-backend=elastic", f"--rdzv-endpoint={self.folder / 'rendezvous'}", "--rdzv-id=job"]
        options += ["--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=3", "--local-addr=127.0.0.1"]
        options += ["--rdzv-conf=last_call_timeout=0,keep_alive=20"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "job.py", str(self.folder)]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self.folder / "log").open("ab") as log:
            agent = subprocess.Popen(command, cwd=self.folder, env=environ, stdout=log, stderr=log)
        self.agents.append(agent)
        return agent

    def wait_for_world(self, size: int) -> list[Start]:
        """The next `size` workers that start in a world of that size; workers of other sizes are
        skipped.
        """
        found: list[Start] = []
        while len(found) < size:
            rank, world_size, pid = json.loads(self.started.readline())
            if world_size == size:
                found.append((rank, world_size, pid))
        return sorted(found)


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    launcher = Torchrun(tmp_path)
    yield launcher
    (tmp_path / "finish").touch()
    for agent in launcher.agents:
        agent.send_signal(signal.SIGTERM)
        try:
            agent.wait(timeout=40)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
    launcher.started.close()


@pytest.mark.process
@pytest.mark.timeout(200)
def test_torchrun_admits_a_newcomer_and_survives_a_killed_worker(torchrun: Torchrun) -> None:
    """One agent trains alone, a second joins, then the worker of rank 1 is killed. Both agents end
    with success.
    """
    first = torchrun.start()
    assert torchrun.wait_for_world(1)[0][0] == 0
    second = torchrun.start()
    pair = torchrun.wait_for_world(2)
    assert [rank for rank, _, _ in pair] == [0, 1]
    os.kill(pair[1][2], signal.SIGKILL)
    again = torchrun.wait_for_world(2)
    assert [rank for rank, _, _ in again] == [0, 1]
    assert not {pid for _, _, pid in pair} & {pid for _, _, pid in again}
    (torchrun.folder / "finish").touch()
    log = torchrun.folder / "log"
    assert (first.wait(timeout=60), second.wait(timeout=60)) == (0, 0), log.read_text()
    newest = max((torchrun.folder / "rendezvous" / "job").glob("state-*"))
    assert json.loads(newest.read_text())["ended"] == {"exit_code": 0, "reason": "complete"}
