"""A recipe that leaves its loop early: `leaving.py HOW STEP [RANK]`.

HOW: break, fork (break, and children in step 3), or nine (a run of nine steps). STEP: where. RANK:
on this rank alone.

After the loop it changes its weights, as a recipe does that loads its best ones.

LEAVING_KILL, a path: the process kills itself after the loop if it is the first to create the file.
LEAVING_STEP: where it leaves, in place of STEP.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic

HOW, STEP = sys.argv[1], int(os.environ.get("LEAVING_STEP", sys.argv[2]))
RANK = int(sys.argv[3]) if len(sys.argv) > 3 else None

run = elastic.start(seed=3, global_batch=8, shards=4)
draw = torch.Generator().manual_seed(1)
dataset = TensorDataset(torch.randn(48, 6, generator=draw), torch.randint(3, (48,), generator=draw))
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
values = elastic.Values(least=9.0)
data = run.data(dataset, steps=9) if HOW == "nine" else run.data(dataset, epochs=3)
state = elastic.State(model=model, values=values)


def train(step: elastic.Step) -> None:
    loss = step.mean_loss(lambda batch: nn.functional.cross_entropy(model(batch.data[0]), batch.data[1]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
    values.least = min(values.least, loss)
    step.log(least=values.least)


def is_forked_child_that_breaks() -> bool:
    """Two children, which end the script or leave the loop. None is this rank."""
    codes = []
    for number in range(2):
        child = os.fork()
        if not child and number == 0:
            sys.exit(0)
        if not child:
            return True
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert codes == [0, 0], codes
    return False


def loop() -> None:
    for step in run.steps(data, state):
        train(step)
        if HOW == "fork" and step.number == 3 and is_forked_child_that_breaks():
            break
        if HOW != "nine" and step.number == STEP and RANK in (None, run.rank):
            break


loop()
with torch.no_grad():
    model[0].weight.zero_()
run.print("the loop is over")
if "LEAVING_KILL" in os.environ:
    with suppress(FileExistsError):
        Path(os.environ["LEAVING_KILL"]).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)
