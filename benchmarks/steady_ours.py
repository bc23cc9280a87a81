"""The recipe of benchmarks/steady.py under elastic-train. It has no end.

Arguments: model, shards of all workers together, precision.
"""

import sys

import torch
from steady_models import WORKLOADS, loss_of, optimizer_of, shard

import elastic

name, shards, precision = sys.argv[1], int(sys.argv[2]), sys.argv[3]
workload = WORKLOADS[name]
run = elastic.start(seed=0, global_batch=shards * workload.samples, shards=shards)
model = workload.model().to(run.device)
if name == "shard":
    shard(model, run.fully_shard)
optimizer = optimizer_of(model)
data = run.data(workload.dataset(shards), epochs=100_000)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(data, state):
    step.mean_loss(lambda batch: loss_of(model, batch.data[0], batch.data[1], precision))
    optimizer.step()
    if run.device.type == "cuda":
        step.log(device_bytes=torch.cuda.max_memory_allocated())
