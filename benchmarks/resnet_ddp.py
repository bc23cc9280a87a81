"""The script of benchmarks/steady.py under plain DistributedDataParallel: ResNet-18 on noise.

Arguments: micro-batches a rank, samples a micro-batch, steps, output file.
"""

import contextlib
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel

accumulate, samples, steps = map(int, sys.argv[1:4])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)
images = torch.randn(steps * world_size * accumulate * samples, 3, 32, 32)
labels = torch.randint(0, 10, (len(images),))
order = torch.randperm(len(images)).view(steps, world_size, accumulate, samples)
model = DistributedDataParallel(torchvision.models.resnet18(num_classes=10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
times = []
for step in range(steps):
    optimizer.zero_grad()
    for part in range(accumulate):
        chosen = order[step, rank, part]
        is_last = part == accumulate - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            (loss / accumulate).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    times.append(time.time())
if rank == 0:
    Path(sys.argv[4]).write_text(json.dumps(times))
dist.destroy_process_group()
