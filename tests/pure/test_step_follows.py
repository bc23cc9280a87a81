"""What a recipe changes while its loop runs is followed, with the same bits at every world size."""

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, samples, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import Dataset

from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State

WIDTH = 8


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    )


def loss_of(net):
    return lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1])


def unfrozen_later(member):
    """Progressive unfreezing, as in fine-tuning: the head alone, all, then all but the first."""
    net = layers()
    net[:4].requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    state = State(net=net, optimizer=optimizer)
    yield state
    for step in steps(member, state):
        if step.number == 2:
            net.requires_grad_(True)
        if step.number == 4:
            net[0].requires_grad_(False)
        step.mean_loss(loss_of(net))
        optimizer.step()
        yield step


def group_added_later(member):
    """The optimizer gets the first layer at step 3."""
    net = layers()
    optimizer = torch.optim.SGD(net[2:].parameters(), lr=0.1, momentum=0.9)
    state = State(net=net, optimizer=optimizer)
    yield state
    for step in steps(member, state):
        if step.number == 3:
            optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.05})
        step.mean_loss(loss_of(net))
        optimizer.step()
        yield step


def module_swapped(member):
    """A new head replaces the old one at step 3; the optimizer gets its parameters instead."""
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    state = State(net=net, optimizer=optimizer)
    yield state
    for step in steps(member, state):
        if step.number == 3:
            for parameter in net[4].parameters():
                del optimizer.state[parameter]
            net[4] = nn.Linear(WIDTH, CLASSES)
            optimizer.param_groups[0]["params"][-2:] = list(net[4].parameters())
        step.mean_loss(loss_of(net))
        optimizer.step()
        yield step


RECIPES = {each.__name__: each for each in (unfrozen_later, group_added_later, module_swapped)}


def train(member, name):
    """Chain values of each step and the state at the end, in bits."""
    coming = RECIPES[name](member)
    state = next(coming)
    seen = [[number.hex() for number in step.outcome.losses] for step in coming]
    return [seen, checksum_of(state.flatten()).entries]


@pytest.mark.parametrize("name", RECIPES)
def test_what_changes_in_the_loop_gives_the_same_bits_at_every_world_size(ranks, name):
    """A parameter that is summed on no rank, or on some, would leave each rank its own gradient."""
    assert ranks.run(3, train, name) == ranks.run(1, train, name) * 3


def kept(member, form):
    """A gradient that the recipe keeps: through `.grad`, or a view of it; over three steps."""
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    held, copies = [], []
    for step in steps(member, State(net=net, optimizer=optimizer)):
        step.mean_loss(loss_of(net))
        gradients = [p.grad for p in net.parameters()]
        if form == "view":
            gradients = [gradient.view(-1)[1:] for gradient in gradients]
        held.append(gradients)
        copies.append([gradient.clone() for gradient in gradients])
        del gradients
        optimizer.step()
        optimizer.zero_grad()
    return all(
        torch.equal(gradient, copy)
        for step, step_copies in zip(held, copies, strict=True)
        for gradient, copy in zip(step, step_copies, strict=True)
    )


@pytest.mark.parametrize("form", ["grad", "view"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_the_recipe_keeps_never_changes(ranks, world_size, form):
    """Vectors are used again in the next step. One that the recipe still looks at must not be."""
    assert ranks.run(world_size, kept, form) == [True] * world_size


class Noisy(Dataset):
    """Its noise grows with the epoch that the loop sets, as in a curriculum."""

    def __init__(self):
        self.parts, self.strength = samples().tensors, 0.0

    def __len__(self):
        return len(self.parts[0])

    def __getitem__(self, index):
        inputs, label = (part[index] for part in self.parts)
        return inputs + self.strength * torch.randn(inputs.shape), label


def test_what_the_body_sets_in_its_dataset_holds_in_that_step():
    """The batch of a step is loaded when the step first computes: a process that begins at this
    step, whose dataset is as the script made it, gets the same batch.
    """

    def batch_of_step(wanted, *, sets_all):
        dataset, state = Noisy(), State(net=layers())
        for step in steps(ALONE, state, dataset=dataset):
            if sets_all or step.number == wanted:
                dataset.strength = 0.1 * step.number
            if step.number == wanted:
                return torch.cat([batch.data[0] for batch in step._batches])
            step._batches  # noqa: B018 - loaded and passed over, as in a step that is trained
        return None

    for number in (1, 2, 3, 4):
        expected = batch_of_step(number, sets_all=True)
        assert torch.equal(batch_of_step(number, sets_all=False), expected)
    assert not torch.equal(batch_of_step(3, sets_all=True), batch_of_step(4, sets_all=True))
