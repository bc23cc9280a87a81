"""A recipe whose step cannot be exact is refused at that step, by name; others are left alone."""

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.errors import UsageError
from elastic.train.state.state import State


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def loss_of(net):
    return lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1])


def recipe(**options):
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, **options)
    return net, optimizer, steps(ALONE, State(net=net, optimizer=optimizer))


def test_gradients_that_are_accumulated_over_steps_are_refused_with_the_sizes_to_start_with():
    """Accumulation by hand: only the last batch before each update would count."""
    net, optimizer, coming = recipe()
    said = ""
    try:
        for step in coming:
            step.mean_loss(loss_of(net))
            if step.number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    except UsageError as error:
        said = str(error)
    assert "step 2: net.0.weight has a gradient that no optimizer has used yet" in said
    assert "k times the global_batch" in said


def test_a_backward_of_the_recipes_own_before_the_steps_is_refused():
    """A penalty's gradients were thrown away; after the step's they are added, as always."""
    net, optimizer, coming = recipe()
    step = next(coming)
    step.mean_loss(loss_of(net))
    without = net[0].weight.grad.clone()
    net[0].weight.square().sum().backward()
    torch.testing.assert_close(net[0].weight.grad, without + 2 * net[0].weight)
    optimizer.step()
    step = next(coming)
    optimizer.zero_grad()
    net[0].weight.square().sum().backward()
    with pytest.raises(UsageError, match=r"net\.0\.weight has a gradient that no optimizer has used"):
        step.mean_loss(loss_of(net))


def gradients_at_the_top(member, form):
    """Whether any parameter has a gradient, before each step's computation and after it."""
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    head = torch.optim.SGD(net[2].parameters(), lr=0.1)
    found = []
    for step in steps(member, State(net=net, optimizer=optimizer, head=head)):
        found.append([p.grad is not None for p in net.parameters()])
        if form == "sum":
            step.backward(step.sum(loss_of(net)))
        elif form == "by hand":
            totals = [step.sum(lambda _batch, p=p: torch.ones_like(p)) for p in net.parameters()]
            for p, total in zip(net.parameters(), totals, strict=True):
                p.grad = total
        else:
            step.mean_loss(loss_of(net))
        found.append([p.grad is not None for p in net.parameters()])
        if form == "in place":
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(0.1 * p.grad)
        elif form == "two optimizers":
            net[0].zero_grad()
            head.step()
        else:
            optimizer.step()
    return [any(each) for each in found]


@pytest.mark.parametrize("form", ["sum", "by hand", "in place", "two optimizers"])
def test_no_used_gradient_is_left_at_the_next_steps_beginning(ranks, form):
    """Such as for a norm that is logged there. A process that takes over has none: nor has any."""
    for world_size in (1, 2):
        assert ranks.run(world_size, gradients_at_the_top, form) == [[False, True] * 4] * world_size


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_dropped_on_purpose_are_not_refused(set_to_none):
    """A recipe that skips the update of a bad batch."""
    net, optimizer, coming = recipe()
    for step in coming:
        optimizer.zero_grad(set_to_none=set_to_none)
        step.mean_loss(loss_of(net))
        if step.number != 2:
            optimizer.step()
    assert step.number == 4


def test_an_update_that_a_scaler_skips_is_not_refused():
    """Its gradients were not finite, and nothing lacks them."""
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in steps(ALONE, State(net=net, optimizer=optimizer, scaler=scaler)):
        factor = 1e38 if step.number == 2 else 1.0
        step.mean_loss(lambda batch, factor=factor: factor * loss_of(net)(batch), scaler)
        scaler.step(optimizer)
        scaler.update()
    assert step.number == 4


def test_an_update_with_gradients_of_the_step_before_is_refused():
    """Gradients are no part of the state: a resume between the two steps would lose them."""
    net, optimizer, coming = recipe()
    next(coming).mean_loss(loss_of(net))
    next(coming)
    with pytest.raises(UsageError, match="SGD made an update with gradients of the step before"):
        optimizer.step()


@pytest.mark.parametrize("form", ["mean", "sum"])
def test_a_backward_inside_the_function_is_refused(form):
    """It gives a parameter one shard's gradient, on the rank that has the shard."""
    net, _, coming = recipe()

    def loss(batch):
        found = loss_of(net)(batch)
        found.backward(retain_graph=True)
        return found

    step = next(coming)
    with pytest.raises(
        UsageError, match=r"inside the function given.*net\.\d\.\w+ a gradient.*Return the loss"
    ):
        step.mean_loss(loss) if form == "mean" else step.sum(loss)


class Forward(nn.Module):
    """A layer, and something that its forward does besides."""

    def __init__(self, besides):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.key = nn.Linear(FEATURES, CLASSES)  # as a momentum encoder: no gradient, no optimizer
        self.key.requires_grad_(requires_grad=False)
        self.register_buffer("initialized", torch.tensor(0))
        self.besides = besides

    def forward(self, x):
        self.besides(self, x)
        return self.layer(x)


def momentum(net, _x):
    """As in MoCo."""
    with torch.no_grad():
        net.key.weight.mul_(0.9).add_(net.layer.weight, alpha=0.1)


def replace(net, _x):
    net.key.weight = nn.Parameter(net.layer.weight.detach() + 1, requires_grad=False)


@pytest.mark.parametrize(
    ("besides", "name"),
    [
        (momentum, "net.key.weight"),
        (replace, "net.key.weight"),
    ],
)
@pytest.mark.parametrize("form", ["mean", "sum"])
def test_a_forward_that_changes_a_parameter_is_refused_by_name(besides, name, form):
    """The next shard of the same rank would begin with other weights."""
    net = Forward(besides)
    step = next(steps(ALONE, State(net=net, optimizer=torch.optim.SGD(net.layer.parameters(), lr=0.1))))
    with pytest.raises(UsageError, match=f"forward changed the parameter {name}"):
        step.mean_loss(loss_of(net)) if form == "mean" else step.sum(loss_of(net))
