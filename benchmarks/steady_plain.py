"""The script of benchmarks/steady.py without elastic-train. It has no end.

Arguments: model, micro-batches of a worker, precision, file for the moments at which steps end.
Under torchrun it trains with DistributedDataParallel or with FSDP2, elsewhere alone.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from steady_models import WORKLOADS, loss_of, optimizer_of, shard
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

name, micro_batches, precision, written = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
workload = WORKLOADS[name]
torch.set_num_threads(1)
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
model: torch.nn.Module = workload.model().to(device)
syncs: Any = None
if dist.is_torchelastic_launched():
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if name == "shard":
        shard(model, fully_shard)
    else:
        syncs = model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
optimizer = optimizer_of(syncs.module if syncs is not None else model)
dataset = workload.dataset(micro_batches * world_size)
sampler: DistributedSampler[Any] = DistributedSampler(
    dataset, num_replicas=world_size, rank=rank, shuffle=True
)


def batches() -> Iterator[list[torch.Tensor]]:
    loader = DataLoader(dataset, batch_size=workload.samples, sampler=sampler, drop_last=True)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


loaded = batches()
out = os.open(written, os.O_CREAT | os.O_WRONLY | os.O_APPEND) if rank == 0 else None
for step in count(1):
    optimizer.zero_grad()
    total = torch.zeros((), device=device)
    for part in range(micro_batches):
        inputs, labels = (each.to(device) for each in next(loaded))
        is_silent = syncs is not None and part < micro_batches - 1
        with syncs.no_sync() if is_silent else contextlib.nullcontext():
            loss = loss_of(model, inputs, labels, precision) / micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    optimizer.step()
    total.item()  # the figure that a script logs; on a GPU it waits for the step
    if out is not None:
        memory = f',"device_bytes":{torch.cuda.max_memory_allocated()}' if device.type == "cuda" else ""
        os.write(out, f'{{"step":{step},"time":{time.time()}{memory}}}\n'.encode())
