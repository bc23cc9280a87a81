"""A step that cannot be exact is refused by name, and one that only looks like it is left alone.

Each recipe gets a net of two layers with a BatchNorm, its optimizer, and the steps of a State that
holds both.
"""

import itertools

import numpy as np
import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.optim.lr_scheduler import ChainedScheduler, StepLR
from torch.utils.checkpoint import checkpoint

from elastic.errors import UsageError
from elastic.observe.step_line import OWN_NAMES
from elastic.train.state.state import State

REFUSED, ALLOWED = {}, {}


def net_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


def loss_of(net):
    return lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1])


def squares(net):
    return lambda batch: net(batch.data[0]).square().sum()


def refused(words):
    def register(recipe):
        REFUSED[recipe.__name__] = recipe, words
        return recipe

    return register


def allowed(recipe):
    ALLOWED[recipe.__name__] = recipe
    return recipe


def begun():
    net = net_of()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, optimizer, steps(ALONE, State(net=net, optimizer=optimizer))


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_cannot_be_exact_is_refused_by_name(name):
    recipe, words = REFUSED[name]
    with pytest.raises(UsageError, match=words):
        recipe(*begun())


@pytest.mark.parametrize("name", ALLOWED)
def test_what_only_looks_like_it_is_left_alone(name):
    ALLOWED[name](*begun())


# Gradients that no update uses.


@refused(r"step 2: net\.0\.weight has a gradient that no optimizer has used yet.*k times the global_batch")
def accumulated_over_steps(net, optimizer, coming):
    for step in coming:
        step.mean_loss(loss_of(net))
        if step.number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


@refused(r"net\.0\.weight has a gradient that no optimizer has used")
def a_penalty_before_the_step(net, _optimizer, coming):
    step = next(coming)
    net[0].weight.square().sum().backward()
    step.mean_loss(loss_of(net))


@refused("SGD made an update with gradients of the step before")
def an_update_in_the_next_step(net, optimizer, coming):
    """A resume between the two would lose the gradients."""
    next(coming).mean_loss(loss_of(net))
    next(coming)
    optimizer.step()


@refused(r"detached, from the function given to step\.sum")
def a_backward_that_was_forgotten(net, optimizer, coming):
    """`loss.backward()` in place of `step.backward(loss)` would train nothing."""
    step = next(coming)
    step.sum(squares(net)).backward()
    optimizer.step()
    step.end_by_hand()


@allowed
def gradients_that_are_dropped_on_purpose(net, optimizer, coming):
    for step in coming:
        optimizer.zero_grad(set_to_none=step.number != 3)
        step.mean_loss(loss_of(net))
        if step.number != 2:
            optimizer.step()


# Functions that do more than to compute.


DOES_MORE = {
    "backward": (
        lambda _net, loss: loss.backward(retain_graph=True),
        r"inside the function given.*net\.\d\.\w+ a gradient.*Return the loss",
    ),
    "written": (
        lambda net, _loss: nn.init.ones_(net[2].bias),
        r"forward changed the parameter net\.2\.bias",
    ),
    "replaced": (
        lambda net, _loss: setattr(net[2], "weight", nn.Parameter(net[2].weight.detach() + 1)),
        r"forward changed the parameter net\.2\.weight",
    ),
    "frozen": (
        lambda net, _loss: net[2].requires_grad_(requires_grad=False),
        r"has frozen net\.2\.weight, net\.2\.bias \(requires_grad = False\)",
    ),
    "unfrozen": (
        lambda net, _loss: net[0].requires_grad_(),
        r"has unfrozen net\.0\.weight \(requires_grad = True\)",
    ),
}


@pytest.mark.parametrize("form", ["mean_loss", "sum"])
@pytest.mark.parametrize("name", DOES_MORE)
def test_a_function_that_does_more_than_to_compute_is_refused(name, form):
    """As MoCo's momentum encoder: the next shard would begin with other weights."""
    more, words = DOES_MORE[name]
    net, _optimizer, coming = begun()
    net[0].weight.requires_grad_(requires_grad=False)

    def loss(batch):
        found = loss_of(net)(batch)
        if batch.shard == 1:
            more(net, found)
        return found

    with pytest.raises(UsageError, match=words):
        getattr(next(coming), form)(loss)


@refused(r"net\.2\.weight to stay in \.grad")
def an_optimizer_in_backward(net, optimizer, coming):
    def update(parameter):
        optimizer.step()
        parameter.grad = None

    step = next(coming)
    net[2].weight.register_post_accumulate_grad_hook(update)
    step.mean_loss(loss_of(net))


def halved(parameter):
    parameter.grad.mul_(0.5)


@refused(r"found a post-accumulate hook at net\.2\.weight")
def a_hook_between_a_sum_and_the_gradients(net, optimizer, coming):
    """It would halve the first shard's gradient, and then that of two together, and so on: another
    result with each number of workers, and none after a restart.
    """
    for step in coming:
        total = step.sum(loss_of(net))
        if step.number == 2:
            net[2].weight.register_post_accumulate_grad_hook(halved)
        step.backward(total / step.shards)
        optimizer.step()


def writing_backward(net, way):
    """A hook writes into a buffer while gradients are computed, or a second forward does."""
    net.register_buffer("seen", torch.zeros(1))

    def again(x):
        if way == "checkpoint":
            net.seen += 1
        return net(x)

    def write(_gradient):
        net.seen.data.add_(1)

    def loss(batch):
        y = checkpoint(again, batch.data[0], use_reentrant=False)
        if way == "data" and y.requires_grad:
            y.register_hook(write)
        return F.cross_entropy(y, batch.data[1])

    for step in steps(ALONE, State(net=net), audits=True):
        step.mean_loss(loss)


for way in ("data", "checkpoint"):
    REFUSED[f"a_backward_that_writes_by_{way}"] = (
        lambda net, *_begun, way=way: writing_backward(net, way),
        r"found another content in net\.seen;",
    )


@refused(r"dense gradient of table\.weight, found a sparse one")
def a_sparse_gradient(_net, _optimizer, _coming):
    table = nn.Embedding(CLASSES, 2, sparse=True)
    step = next(steps(ALONE, State(table=table, optimizer=torch.optim.SparseAdam(table.parameters()))))
    step.mean_loss(lambda batch: table(batch.data[1]).sum())


# Sums that are no sums, and losses that are no losses.

REFUSED |= {
    "whole_numbers_whose_sum_may_wrap": (
        lambda _net, _optimizer, coming: next(coming).sum(
            lambda batch: torch.tensor([0, 2**60 * (batch.shard == 5)])
        ),
        "at most 1152921504606846975 in each part.* found 1152921504606846976;",
    ),
    "two_outputs": (
        lambda net, _optimizer, coming: next(coming).sum(lambda batch: (net(batch.data[0]).sum(), 1)),
        "found a tuple",
    ),
    "a_sparse_output": (
        lambda net, _optimizer, coming: next(coming).sum(lambda batch: net(batch.data[0]).to_sparse()),
        r"torch\.sparse_coo",
    ),
    "a_loss_of_each_sample": (
        lambda net, _optimizer, coming: next(coming).mean_loss(lambda batch: net(batch.data[0]).mean(1)),
        r"\.mean\(\).* found a tensor of shape \[3\]",
    ),
    "a_loss_without_a_graph": (
        lambda net, _optimizer, coming: next(coming).mean_loss(
            lambda batch: net(batch.data[0]).detach().sum()
        ),
        "found a tensor .*, without a graph",
    ),
    "what_no_line_can_hold": (
        lambda _net, _optimizer, coming: next(coming).log(value=np.ones(3)),
        r"step\.log\(value=\.\.\.\): expected one number or a text",
    ),
    "a_scaler_that_is_not_in_the_state": (
        lambda net, _optimizer, coming: next(coming).mean_loss(loss_of(net), torch.amp.GradScaler("cpu")),
        r"hold the GradScaler.*scaler=scaler",
    ),
}
ALLOWED |= {
    "a_scaler_that_does_nothing": lambda net, _optimizer, coming: next(coming).mean_loss(
        loss_of(net), torch.amp.GradScaler("cpu", enabled=False)
    ),
    "a_schedule_inside_another_one": lambda net, optimizer, _coming: next(
        steps(
            ALONE,
            State(net=net, optimizer=optimizer, schedule=ChainedScheduler([StepLR(optimizer, 2)])),
        )
    ),
}


@refused(r"step\.mean_loss: the graph of one shard was already used")
def a_graph_that_the_body_made_for_all_shards(net, _optimizer, coming):
    rows = F.normalize(net[0].weight)
    next(coming).mean_loss(lambda batch: F.linear(batch.data[0], rows).mean())


@refused(r"uses the result of an earlier step\.sum")
def a_sum_that_needs_the_gradient_of_an_earlier_one(net, _optimizer, coming):
    step = next(coming)
    centre = step.sum(lambda batch: net(batch.data[0]).sum(0)) / step.global_batch
    step.backward(step.sum(lambda batch: (net(batch.data[0]) - centre).square().sum()))


@refused(r"as in the steps before, found .* with a graph for shard 0")
def a_graph_that_appears_in_a_later_step(net, optimizer, coming):
    """Another rank may not have it, and would not take part in the backward."""

    def output(batch):
        return squares(net)(batch) if net.training else squares(net)(batch).detach()

    net.eval()
    next(coming).sum(output)
    optimizer.step()
    net.train()
    next(coming).sum(output)


OF_BEFORE = r"a loss uses the result of a step\.sum of step 1 after a later"


@refused(OF_BEFORE)
def a_sum_of_the_step_before(net, optimizer, coming):
    step = next(coming)
    total = step.sum(squares(net))
    step.backward(total)
    optimizer.step()
    step = next(coming)
    step.backward(total + step.sum(squares(net)))


@refused(OF_BEFORE)
def a_sum_of_before_the_update(net, optimizer, coming):
    step = next(coming)
    total = step.sum(squares(net))
    step.mean_loss(squares(net))
    optimizer.step()
    step.backward(total + step.sum(squares(net)))


# Lines of the metrics.


@refused("a name of the recipe's own")
def a_name_that_the_run_writes(_net, _optimizer, coming):
    step = next(coming)
    step.log(loss=0.5, step=step.number, epoch=step.epoch)
    step.log(**{min(OWN_NAMES): 0.125})


@refused(r"step\.log\(a=\.\.\., b=\.\.\.\): the line of step 1 .* is written already")
def a_value_after_the_line(_net, _optimizer, coming):
    step = next(coming)
    step.has_line = True
    step.log(a=0.5, b=1)


# What a resume would lose.


@refused(r"found one of shape \[3, 3\] outside")
def a_module_that_is_trained_and_not_in_the_state(net, _optimizer, _coming):
    optimizer = torch.optim.Adam([*net.parameters(), *nn.Linear(CLASSES, CLASSES).parameters()])
    next(steps(ALONE, State(net=net, optimizer=optimizer)))


@refused("without assign=True")
def a_load_that_replaces_the_parameters(net, optimizer, coming):
    """The optimizer goes on with the old ones: in plain PyTorch training stops without a word."""
    next(coming).mean_loss(loss_of(net))
    optimizer.step()
    net.load_state_dict({name: each / 2 for name, each in net.state_dict().items()}, assign=True)
    next(coming).mean_loss(loss_of(net))


@refused("found Adam outside")
def an_optimizer_that_is_not_in_the_state(net, _optimizer, _coming):
    optimizer = torch.optim.Adam(net.parameters())
    next(steps(ALONE, State(net=net))).mean_loss(loss_of(net))
    optimizer.step()


@refused("change groups in place")
def an_optimizer_that_the_loop_builds_again(net, optimizer, coming):
    next(coming).mean_loss(loss_of(net))
    optimizer.step()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    next(coming).mean_loss(loss_of(net))
    optimizer.step()


class Climber(torch.optim.Optimizer):
    """SAM, as it is usually written: its state_dict leaves out that of the optimizer inside."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inside = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inside.param_groups

    def step(self):
        self.inside.step()


@refused("found SGD outside")
def momenta_inside_a_wrapping_optimizer(net, _optimizer, _coming):
    optimizer = Climber(net.parameters())
    next(steps(ALONE, State(net=net, optimizer=optimizer))).mean_loss(loss_of(net))
    optimizer.step()


@allowed
def momenta_that_are_saved_beside_their_wrapper(net, _optimizer, _coming):
    optimizer = Climber(net.parameters())
    next(steps(ALONE, State(net=net, optimizer=optimizer, base=optimizer.inside))).mean_loss(loss_of(net))
    optimizer.step()


@allowed
def optimizers_of_the_state_that_take_turns(net, optimizer, _coming):
    """And each step makes one without a state of its own."""
    second = torch.optim.Adam(net.parameters())
    for step in steps(ALONE, State(net=net, first=optimizer, second=second)):
        step.mean_loss(loss_of(net))
        (optimizer if step.number < 3 else second).step()
        torch.optim.SGD(net.parameters(), lr=1e-3 / step.number).step()


@refused(r"hold the learning rate schedule of its SGD.*scheduler=scheduler")
def a_schedule_that_is_not_in_the_state(_net, optimizer, coming):
    schedule = StepLR(optimizer, 2)
    next(coming)
    assert schedule


@allowed
def an_optimizer_of_a_probe(net, optimizer, coming):
    """Fitted in the loop from the features of the moment, and kept nowhere."""
    probe = nn.Linear(CLASSES, 1)
    of_probe = torch.optim.Adam(probe.parameters())
    for step in itertools.islice(coming, 2):
        step.mean_loss(loss_of(net))
        optimizer.step()
        of_probe.zero_grad()
        probe(torch.ones(2, CLASSES)).sum().backward()
        of_probe.step()
