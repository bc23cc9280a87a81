"""Which parameters require a gradient is the loop's to say; a function leaves it as it found it."""

import random
from contextlib import contextmanager

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


def by_labels(net, batch):
    net[0].requires_grad_(bool(batch.data[1].sum() % 2))
    return loss_of(net, batch)


def frozen_after_the_forward(net, batch):
    loss = loss_of(net, batch)
    net[0].requires_grad_(requires_grad=False)
    return loss


def unfrozen_for_the_next_shard(net, batch):
    loss = loss_of(net, batch)
    net[4].requires_grad_(batch.shard == 1)
    return loss


BUILT_FROZEN = [unfrozen_for_the_next_shard]
REFUSED = [
    (by_labels, "has frozen net.0.weight, net.0.bias (requires_grad = False)"),
    (frozen_after_the_forward, "has frozen net.0.weight, net.0.bias (requires_grad = False)"),
    (unfrozen_for_the_next_shard, "has unfrozen net.4.weight, net.4.bias (requires_grad = True)"),
]


def refusal(member, index, form):
    torch.set_num_threads(1)
    function, _ = REFUSED[index]
    net = network()
    net[4].requires_grad_(function not in BUILT_FROZEN)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in steps(member, State(net=net, optimizer=optimizer)):
        try:
            if form == "one mean":
                step.mean_loss(lambda batch: function(net, batch))
            else:
                step.sum(lambda batch: net(batch.data[0]).mean())
                step.backward(step.sum(lambda batch: function(net, batch)))
        except UsageError as error:
            return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("form", ["one mean", "two sums"])
@pytest.mark.parametrize("index", range(len(REFUSED)), ids=[each.__name__ for each, _ in REFUSED])
def test_a_function_that_leaves_parameters_frozen_or_unfrozen_is_refused_in_that_step(index, form):
    """The next shard of the same worker would begin so, and no shard of another worker: one worker
    would end complete with a result of its own, and two would sum vectors of other sizes.
    """
    _, said = REFUSED[index]
    found = refusal(ALONE, index, form)
    assert found.startswith("step 1: the function given to") and said in found
    assert "Set requires_grad in the loop's body" in found


def set_requires_grad(net, flag):
    for parameter in net.parameters():
        parameter.requires_grad = flag


def adversarial(member, form):
    """A GAN whose critic is frozen for the generator's loss."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, FEATURES), nn.Linear(FEATURES, 1)
    of_generator, of_critic = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic))
    in_function = set_requires_grad if form == "function" else lambda _net, _flag: None
    in_body = set_requires_grad if form == "body" else lambda _net, _flag: None

    def fake(batch):
        return generator(torch.randn(len(batch.data[0]), 2))

    def critics_loss(batch):
        in_function(critic, True)
        return softplus(-critic(batch.data[0])).mean() + softplus(critic(fake(batch).detach())).mean()

    def generators_loss(batch):
        in_function(critic, False)
        return softplus(-critic(fake(batch))).mean()

    state = State(generator=generator, critic=critic, of_generator=of_generator, of_critic=of_critic)
    for step in steps(member, state):
        in_body(critic, True)
        step.mean_loss(critics_loss)
        of_critic.step()
        of_critic.zero_grad()
        in_body(critic, False)
        step.mean_loss(generators_loss)
        of_generator.step()
    return checksum_of(state.flatten()).whole


def test_a_gan_that_freezes_its_critic_in_the_body_is_exact_and_in_its_losses_is_refused(ranks):
    expected = adversarial(ALONE, "body")
    for world_size in (2, 3):
        assert ranks.run(world_size, adversarial, "body") == [expected] * world_size
    with pytest.raises(UsageError, match=r"step 1: the function .* has frozen critic\.weight, critic\.bias"):
        adversarial(ALONE, "function")


@contextmanager
def frozen(module):
    module.requires_grad_(requires_grad=False)
    try:
        yield
    finally:
        module.requires_grad_(requires_grad=True)


def train_with_a_frozen_block(member):
    torch.set_num_threads(1)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = State(net=net, optimizer=optimizer)

    def loss(batch):
        with frozen(net[2 * random.randrange(2)]):
            return loss_of(net, batch)

    for step in steps(member, state):
        step.mean_loss(loss)
        optimizer.step()
    return checksum_of(state.flatten()).whole


def test_a_function_may_freeze_a_block_for_itself(ranks):
    expected = train_with_a_frozen_block(ALONE)
    for world_size in (2, 3):
        assert ranks.run(world_size, train_with_a_frozen_block) == [expected] * world_size
