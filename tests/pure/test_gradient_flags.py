"""Which parameters require a gradient is the loop's to say; a function leaves it as it found it."""

import random
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn.functional import cross_entropy, softplus

from elastic.errors import UsageError
from elastic.reduce.gradient_flags import GradientFlags
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def loss_of(net, batch):
    return cross_entropy(net(batch.data[0]), batch.data[1])


def a_block_of_chance(net, batch):
    """As a randomised block coordinate descent."""
    chosen = random.randrange(2)
    net[0].requires_grad_(chosen == 0)
    net[2].requires_grad_(chosen == 1)
    return loss_of(net, batch)


def by_labels(net, batch):
    net[0].requires_grad_(bool(batch.data[1].sum() % 2))
    return loss_of(net, batch)


def frozen_after_the_forward(net, batch):
    loss = loss_of(net, batch)
    net[0].requires_grad_(requires_grad=False)
    return loss


def frozen_for_the_next_shard(net, batch):
    """Only one shard finds it, and the last one of the pass leaves what the first one found."""
    loss = loss_of(net, batch)
    net[0].requires_grad_(batch.shard != 1)
    return loss


def unfrozen_for_the_next_shard(net, batch):
    loss = loss_of(net, batch)
    net[4].requires_grad_(batch.shard == 1)
    return loss


def everything_frozen(net, batch):
    net.requires_grad_(requires_grad=False)
    return loss_of(net, batch)


BUILT_FROZEN = [unfrozen_for_the_next_shard]
REFUSED = [
    (a_block_of_chance, "has frozen net."),
    (by_labels, "has frozen net.0.weight, net.0.bias (requires_grad = False)"),
    (frozen_after_the_forward, "has frozen net.0.weight, net.0.bias (requires_grad = False)"),
    (frozen_for_the_next_shard, "has frozen net.0.weight, net.0.bias (requires_grad = False)"),
    (unfrozen_for_the_next_shard, "has unfrozen net.4.weight, net.4.bias (requires_grad = True)"),
    (everything_frozen, "has frozen net.0.weight, net.0.bias, net.2.weight and 3 more"),
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


@pytest.mark.parametrize("form", ["one mean", "two sums"])
def test_each_of_several_workers_whose_shards_find_it_refuses_it(ranks, form):
    index = [function for function, _ in REFUSED].index(frozen_after_the_forward)
    assert ranks.run(2, refusal, index, form) == [refusal(ALONE, index, form)] * 2


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


@given(st.lists(st.tuples(st.booleans(), st.booleans())))
def test_what_has_another_flag_is_told_in_order(flags):
    parameters = [nn.Parameter(torch.zeros(1), requires_grad=before) for before, _ in flags]
    found = GradientFlags(parameters)
    for parameter, (_, after) in zip(parameters, flags, strict=True):
        parameter.requires_grad = after
    others = [index for index, (before, after) in enumerate(flags) if before != after]
    assert [id(each) for each in found.changed()] == [id(parameters[index]) for index in others]
