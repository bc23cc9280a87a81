"""What a rank of a sharded run holds, beside a part of the whole and the largest block.

python benchmarks/sharded_memory.py [--layers 8] [--width 1024] [--workers 1 2 4]

An MLP with AdamW is trained for a few steps by 1, 2 and 4 workers, under run.fully_shard of each
layer. Each rank tells the bytes of its parameters, gradients and optimizer state after a step, and
of the memory that it has by itself (RssAnon) above that before the model was built: after the last
step, and at most, looked at every few milliseconds. Freed memory goes back at once
(MALLOC_MMAP_THRESHOLD_): glibc would keep much of it, as it does under torch's own fully_shard. The
largest part is that of the checkpoint, which a snapshot has as well.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

import elastic
from elastic.snapshot.sharded import local

STEPS = 6
Y = "--recipe"


def own_memory_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def train(layers: int, width: int) -> None:
    """As a recipe."""
    run = elastic.start(seed=0, global_batch=8, shards=4)
    torch.ones(8, 8).sum()
    before, seen = own_memory_bytes(), [0]

    def watch() -> None:
        while True:
            seen[0] = max(seen[0], own_memory_bytes())
            time.sleep(0.003)

    threading.Thread(target=watch, daemon=True).start()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for layer in model:
        run.fully_shard(layer)
    run.fully_shard(model)
    model.to_empty(device=run.device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    state = elastic.State(model=model, optimizer=optimizer)
    samples = TensorDataset(torch.randn(64, width))
    for step in run.steps(run.data(samples, steps=STEPS), state):
        step.mean_loss(lambda batch: model(batch.data[0]).square().mean())
        optimizer.step()
        tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
        found = {
            "whole": sum(each.nbytes for each in tensors),
            "own": sum(local(each).nbytes for each in tensors),
            "after": own_memory_bytes() - before,
            "most": seen[0] - before,
        }
        run.path(f"memory-{run.rank}-{step.number}.json").write_text(json.dumps(found))


def measured(folder: Path, workers: int, layers: int, width: int) -> list[str]:
    command = [str(Path(sys.executable).parent / "elastic-train"), __file__, "--run-dir", str(folder)]
    command += [
        "--nproc-per-node",
        str(workers),
        "--rehearse",
        "off",
        "--audit",
        "off",
        "--save-every",
        "3steps",
    ]
    command += ["--snapshot-every", "1", "--", Y, str(layers), str(width)]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((folder / f"memory-{rank}-{STEPS}.json").read_text()) for rank in range(workers)]
    (record,) = folder.glob(f"checkpoints/{STEPS:012d}/*/COMMIT.json")
    parts = [each["size_bytes"] for each in json.loads(record.read_text())["parts"]]
    block = 4 * (width * width + width)
    whole = ranks[0]["whole"]
    limit = whole / workers * 1.1 + block
    own, after, most = (max(each[name] for each in ranks) for name in ("own", "after", "most"))
    assert own <= limit, f"a rank holds {own} bytes, more than {limit:.0f}"
    numbers = whole, whole / workers, limit, own, after, most, max(parts)
    return [str(workers), *(f"{number / 1e6:.1f}" for number in numbers)]


def main() -> None:
    if sys.argv[1:2] == [Y]:
        train(*map(int, sys.argv[2:]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    columns = (
        "workers",
        "whole",
        "whole / W",
        "x 1.1 + block",
        "of a rank",
        "its RssAnon",
        "at most",
        "largest part",
    )
    table = Table(*columns, title="MB")
    with tempfile.TemporaryDirectory() as name:
        for workers in args.workers:
            table.add_row(*measured(Path(name) / str(workers), workers, args.layers, args.width))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
