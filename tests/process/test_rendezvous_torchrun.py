"""Plain torchrun agents with our rendezvous: real processes, a real collective, a real SIGKILL."""

import json
import os
import signal

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


class Torchrun:
    """Agents of torchrun in a drill's folder, which start the script."""

    def __init__(self, drill):
        self.folder, self._drill = drill.folder, drill
        (self.folder / "job.py").write_text(SCRIPT)
        os.mkfifo(self.folder / "started")
        # Open for reading and writing: workers that open it never wait for a reader, and a reader
        # never sees its end.
        self.started = os.fdopen(os.open(self.folder / "started", os.O_RDWR), "rb")

    def start(self):
        options = ["--rdzv-backend=elastic", f"--rdzv-endpoint={self.folder / 'rendezvous'}", "--rdzv-id=job"]
        options += ["--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=3", "--local-addr=127.0.0.1"]
        options += ["--rdzv-conf=last_call_timeout=0,keep_alive=20"]
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return self._drill.start_torchrun(*options, "job.py", str(self.folder), env=env)

    def wait_for_world(self, size):
        """Rank, world size and pid of the next `size` workers that start in a world of that size;
        workers of other sizes are skipped.
        """
        found = []
        while len(found) < size:
            rank, world_size, pid = json.loads(self.started.readline())
            if world_size == size:
                found.append((rank, world_size, pid))
        return sorted(found)


@pytest.fixture
def torchrun(drill):
    torchrun = Torchrun(drill)
    yield torchrun
    torchrun.started.close()


@pytest.mark.process
@pytest.mark.timeout(600)
def test_torchrun_admits_a_newcomer_and_survives_a_killed_worker(torchrun):
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
    for agent in (first, second):
        agent.ends_with(0)
    newest = max((torchrun.folder / "rendezvous" / "job").glob("state-*"))
    assert json.loads(newest.read_text())["ended"] == {"exit_code": 0, "reason": "complete"}
