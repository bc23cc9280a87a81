"""The script of benchmarks/recovery.py under torchrun: the same work, as users of torchrun write
it.

DistributedDataParallel. Rank 0 saves model, optimizer and step at an interval, atomically (a
temporary file and a rename), and every rank loads that file at its start. The ranks share the
global batch, so a step is the same work as in recovery_ours.py. Arguments: global batch, steps
between saves, checkpoint file, seconds that the script takes besides.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel

IMAGES = 256

global_batch, save_every = map(int, sys.argv[1:3])
checkpoint = Path(sys.argv[3])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
time.sleep(float(sys.argv[4]))
noise = torch.Generator().manual_seed(0)
images = torch.randn(IMAGES, 3, 32, 32, generator=noise)
labels = torch.randint(0, 10, (IMAGES,), generator=noise)
model = torchvision.models.resnet18(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
parallel = DistributedDataParallel(model)
steps_log = os.open(os.environ["STEPS_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
while True:
    epoch, batch = divmod(step, IMAGES // global_batch)
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch))
    mine = order[batch * global_batch : (batch + 1) * global_batch].chunk(world_size)[rank]
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(parallel(images[mine]), labels[mine])
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    step += 1
    os.write(steps_log, f"{step},{time.time()},{rank},{os.getpid()},{world_size}\n".encode())
    if rank == 0 and step % save_every == 0:
        unfinished = checkpoint.with_suffix(".new")
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished
        )
        unfinished.replace(checkpoint)
