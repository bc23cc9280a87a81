"""Blocks in which torch keeps what it makes of weights may stand around the loop."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from steps import ALONE, CLASSES, CPU, FEATURES, SAMPLES, NoPage, groups_of, samples, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.utils import parametrize

from elastic.data.loader import BatchLoader
from elastic.train.evaluate.evaluation import Evaluation
from elastic.train.state.state import State
from elastic.worker.heartbeat import HeartbeatSender


class Centred(nn.Module):
    def forward(self, weight):
        return weight - weight.mean(0)


BLOCKS = {"autocast": partial(torch.autocast, "cpu", torch.bfloat16), "parametrize": parametrize.cached}


def evaluation(net):
    return Evaluation(
        loader=BatchLoader(dataset=samples(), seed=9, device=CPU, workers=0, collate=None),
        samples=SAMPLES,
        batch_size=SAMPLES,
        modules=[net],
        groups=groups_of(ALONE),
        heartbeat=HeartbeatSender(NoPage(), 0),
    )


def trained(around_loop, around_call):
    """The weights after four steps, and what the body computes and evaluates in each of them.

    One shard uses the first layer without gradients, and what is kept then has no graph.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    parametrize.register_parametrization(net[0], "weight", Centred())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    inputs, seen = samples().tensors[0], []

    def loss_of(batch):
        with around_call(), torch.set_grad_enabled(batch.shard != 0):
            hidden = net[:2](batch.data[0])
        with around_call():
            return F.cross_entropy(net[2](hidden).float(), batch.data[1])

    def total(batch):
        with around_call():
            return net(batch.data[0]).float().sum()

    with around_loop():
        for step in steps(ALONE, State(net=net, optimizer=optimizer)):
            seen.append(step.mean_loss(loss_of))
            optimizer.step()
            with around_call(), torch.no_grad():
                seen.append(net(inputs).float().sum().item())
            seen.append(evaluation(net).sum(total))
    return [parameter.tolist() for parameter in net.parameters()], seen


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_keeps_casts_of_weights_around_the_loop_changes_nothing(name):
    """Torch would compute with the weights of the first step until the loop ends; a worker that
    takes over, with those of the step where it goes on.
    """
    block = BLOCKS[name]
    around_call = trained(nullcontext, block)

    assert trained(block, nullcontext if name == "parametrize" else block) == around_call
