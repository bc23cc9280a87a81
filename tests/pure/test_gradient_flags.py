"""Which parameters require a gradient is the loop's to say; a function leaves it as it found it."""

import re

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn.functional import cross_entropy, softplus

from elastic.errors import UsageError
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def loss_of(net, batch):
    return cross_entropy(net(batch.data[0]), batch.data[1])


def frozen_after_the_forward(net, batch):
    loss = loss_of(net, batch)
    net[0].requires_grad_(requires_grad=False)
    return loss


def unfrozen_for_the_next_shard(net, batch):
    loss = loss_of(net, batch)
    net[4].requires_grad_(batch.shard == 1)
    return loss


@pytest.mark.parametrize("form", ["one mean", "two sums"])
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (frozen_after_the_forward, "has frozen net.0.weight, net.0.bias (requires_grad = False)"),
        (unfrozen_for_the_next_shard, "has unfrozen net.4.weight, net.4.bias (requires_grad = True)"),
    ],
)
def test_a_function_that_leaves_parameters_frozen_or_unfrozen_is_refused_in_that_step(function, said, form):
    """The next shard of the same worker would begin so, and no shard of another worker: one worker
    would end complete with a result of its own, and two would sum vectors of other sizes.
    """
    net = network()
    net[4].requires_grad_(function is frozen_after_the_forward)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = next(steps(ALONE, State(net=net, optimizer=optimizer)))
    computed = step.mean_loss
    if form == "two sums":
        step.sum(lambda batch: net(batch.data[0]).mean())
        computed = step.sum
    with pytest.raises(UsageError, match=re.escape(said)):
        computed(lambda batch: function(net, batch))


def adversarial(member, form):
    """A GAN whose critic is frozen for the generator's loss: in the body, or in the functions."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, FEATURES), nn.Linear(FEATURES, 1)
    of_generator, of_critic = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic))

    def set_critic(place, *, flag):
        if form == place:
            critic.requires_grad_(flag)

    def fake(batch):
        return generator(torch.randn(len(batch.data[0]), 2))

    def critics_loss(batch):
        set_critic("function", flag=True)
        return softplus(-critic(batch.data[0])).mean() + softplus(critic(fake(batch).detach())).mean()

    def generators_loss(batch):
        set_critic("function", flag=False)
        return softplus(-critic(fake(batch))).mean()

    state = State(generator=generator, critic=critic, of_generator=of_generator, of_critic=of_critic)
    for step in steps(member, state):
        set_critic("body", flag=True)
        step.mean_loss(critics_loss)
        of_critic.step()
        set_critic("body", flag=False)
        step.mean_loss(generators_loss)
        of_generator.step()
    return checksum_of(state.flatten()).whole


def test_a_gan_that_freezes_its_critic_in_the_body_is_exact_and_in_its_losses_is_refused(ranks):
    assert ranks.run(3, adversarial, "body") == [adversarial(ALONE, "body")] * 3
    with pytest.raises(UsageError, match=r"step 1: the function .* has frozen critic\.weight, critic\.bias"):
        adversarial(ALONE, "function")
