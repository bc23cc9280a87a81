"""The recipe of benchmarks/recovery.py under elastic-train: ResNet-18 on noise.

Each finished step adds a line to the file $STEPS_LOG. Training lasts longer than any benchmark. The
few images are made at the start, so that a start costs little. Arguments: global batch, shards,
seconds that the script takes besides (a real one builds the index of its data, and more).
"""

import os
import sys
import time

import torch
import torchvision
from torch.utils.data import TensorDataset

import elastic

IMAGES, EPOCHS = 256, 100_000

global_batch, shards = map(int, sys.argv[1:3])
run = elastic.start(seed=0, global_batch=global_batch, shards=shards)
time.sleep(float(sys.argv[3]))
noise = torch.Generator().manual_seed(0)
images = torch.randn(IMAGES, 3, 32, 32, generator=noise)
labels = torch.randint(0, 10, (IMAGES,), generator=noise)
model = torchvision.models.resnet18(num_classes=10).to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = run.data(TensorDataset(images, labels), epochs=EPOCHS)
state = elastic.State(model=model, optimizer=optimizer)
steps_log = os.open(os.environ["STEPS_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for step in run.steps(data, state):
    step.mean_loss(lambda batch: torch.nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    optimizer.step()
    os.write(steps_log, f"{step.number},{time.time()},{run.rank},{os.getpid()},{run.world_size}\n".encode())
