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

from elastic.errors import UsageError
from elastic.observe.step_line import OWN_NAMES
from elastic.proof.audit import StepAudit
from elastic.train.state.state import State

REFUSED, ALLOWED = {}, []


class Begun:
    def __init__(self):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.coming = steps(ALONE, State(net=self.net, optimizer=self.optimizer))

    def next(self):
        return next(self.coming)

    def holding(self, **objects):
        """The first step of a State that holds the net and these."""
        return next(steps(ALONE, State(net=self.net, **objects)))

    def loss(self, batch):
        return F.cross_entropy(self.net(batch.data[0]), batch.data[1])

    def squares(self, batch):
        return self.net(batch.data[0]).square().sum()

    def update(self, step, optimizer=None):
        step.mean_loss(self.loss)
        (optimizer or self.optimizer).step()


def refused(words):
    def register(recipe):
        REFUSED[recipe.__name__] = recipe, words
        return recipe

    return register


def allowed(recipe):
    ALLOWED.append(recipe)
    return recipe


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_cannot_be_exact_is_refused_by_name(name):
    recipe, words = REFUSED[name]
    with pytest.raises(UsageError, match=words):
        recipe(Begun())


@pytest.mark.parametrize("recipe", ALLOWED, ids=lambda recipe: recipe.__name__)
def test_what_only_looks_like_it_is_left_alone(recipe):
    recipe(Begun())


# Gradients that no update uses.


@refused("SGD made an update with gradients of the step before")
def an_update_in_the_next_step(r):
    """A resume between the two would lose the gradients."""
    r.next().mean_loss(r.loss)
    r.next()
    r.optimizer.step()


@refused(r"step 2: net\.2\.weight has a gradient that no optimizer has used yet.*k times the global_batch")
def a_backward_of_its_own_after_the_update(r):
    for step in r.coming:
        r.update(step)
        r.optimizer.zero_grad()
        r.net[2].weight.square().sum().backward()


@refused(r"detached, from the function given to step\.sum")
def a_backward_that_was_forgotten(r):
    """`loss.backward()` in place of `step.backward(loss)` would train nothing."""
    step = r.next()
    step.sum(r.squares).backward()
    r.optimizer.step()
    step.end_by_hand()


@allowed
def gradients_that_are_dropped_on_purpose(r):
    for step in r.coming:
        r.optimizer.zero_grad(set_to_none=step.number != 3)
        step.mean_loss(r.loss)
        if step.number != 2:
            r.optimizer.step()


# Functions that do more than to compute.


DOES_MORE = {
    "backward": (
        lambda _net, loss: loss.backward(retain_graph=True),
        r"inside the function given.*net\.\d\.\w+ a gradient.*Return the loss",
    ),
    "written": (lambda net, _loss: nn.init.ones_(net[2].bias), r"forward changed the parameter net\.2\.bias"),
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
    r = Begun()
    r.net[0].weight.requires_grad_(requires_grad=False)

    def loss(batch):
        found = r.loss(batch)
        if batch.shard == 1:
            more(r.net, found)
        return found

    with pytest.raises(UsageError, match=words):
        getattr(r.next(), form)(loss)


@refused(r"autograd alone to write the gradient of net\.2\.bias, once a shard, found it changed")
def zeroed_gradients_of_earlier_shards(r):
    """In its second call the function zeroes what the first shard gave."""
    step = r.next()
    step.mean_loss(lambda batch: (r.optimizer.zero_grad(set_to_none=False), r.loss(batch))[1])


@refused(r"found another content in net\.seen;")
def a_buffer_that_a_backward_writes(r):
    r.net.register_buffer("seen", torch.zeros(1))

    def write(_gradient):
        r.net.seen.data.add_(1)

    def loss(batch):
        y = r.net(batch.data[0])
        if y.requires_grad:
            y.register_hook(write)
        return F.cross_entropy(y, batch.data[1])

    for step in steps(ALONE, State(net=r.net), audits=StepAudit):
        step.mean_loss(loss)


@refused(r"dense gradient of table\.weight, of torch\.float32, found one of torch\.float32 and torch\.sparse")
def a_sparse_gradient(r):
    table = nn.Embedding(CLASSES, 2, sparse=True)
    step = r.holding(table=table, optimizer=torch.optim.SparseAdam(table.parameters()))
    step.mean_loss(lambda batch: table(batch.data[1]).sum())


# Sums that are no sums, and losses that are no losses.

REFUSED |= {
    "two_outputs": (lambda r: r.next().sum(lambda batch: (r.squares(batch), 1)), "found a tuple"),
    "a_sparse_output": (
        lambda r: r.next().sum(lambda batch: r.net(batch.data[0]).to_sparse()),
        r"torch\.sparse_coo",
    ),
    "a_loss_of_each_sample": (
        lambda r: r.next().mean_loss(lambda batch: r.net(batch.data[0]).mean(1)),
        r"\.mean\(\).* found a tensor of shape \[3\]",
    ),
    "a_loss_without_a_graph": (
        lambda r: r.next().mean_loss(lambda batch: r.squares(batch).detach()),
        "found a tensor .*, without a graph",
    ),
    "what_no_line_can_hold": (
        lambda r: r.next().log(value=np.ones(3)),
        r"step\.log\(value=\.\.\.\): expected one number or a text",
    ),
    "a_name_that_the_run_writes": (
        lambda r: r.next().log(loss=0.5, step=1, epoch=0, **{min(OWN_NAMES): 0.125}),
        "a name of the recipe's own",
    ),
    "a_scaler_that_is_not_in_the_state": (
        lambda r: r.next().mean_loss(r.loss, torch.amp.GradScaler("cpu")),
        r"hold the GradScaler.*scaler=scaler",
    ),
}


@allowed
def a_scaler_that_does_nothing_and_a_schedule_inside_another_one(r):
    step = r.holding(optimizer=r.optimizer, schedule=ChainedScheduler([StepLR(r.optimizer, 2)]))
    step.mean_loss(r.loss, torch.amp.GradScaler("cpu", enabled=False))


@refused(r"step\.log\(a=\.\.\., b=\.\.\.\): the line of step 1 .* is written already")
def a_value_after_the_line(r):
    step = r.next()
    step.has_line = True
    step.log(a=0.5, b=1)


@refused(r"uses the result of an earlier step\.sum")
def a_sum_that_needs_the_gradient_of_an_earlier_one(r):
    step = r.next()
    centre = step.sum(lambda batch: r.net(batch.data[0]).sum(0)) / step.global_batch
    step.backward(step.sum(lambda batch: (r.net(batch.data[0]) - centre).square().sum()))


@refused(r"as in the steps before, found .* with a graph for shard 0")
def a_graph_that_appears_in_a_later_step(r):
    """Another rank may not have it, and would not take part in the backward."""

    def output(batch):
        return r.squares(batch) if r.net.training else r.squares(batch).detach()

    for mode in (False, True):
        r.net.train(mode)
        r.next().sum(output)
        r.optimizer.step()


@refused(r"a loss uses the result of a step\.sum of step 1 after a later")
def a_sum_of_the_step_before(r):
    step = r.next()
    total = step.sum(r.squares)
    step.backward(total)
    r.optimizer.step()
    step = r.next()
    step.backward(total + step.sum(r.squares))


@refused("the loop's body changed .*weight between a sum and the gradients")
def weights_that_change_before_their_gradients(r):
    step = r.next()
    total = step.sum(r.squares)
    next(r.net.parameters()).detach().mul_(1.5)
    step.backward(total)


# What a resume would lose.


@refused(r"of shape \[3, 3\] outside")
def a_module_that_is_trained_and_not_in_the_state(r):
    outside = nn.Linear(CLASSES, CLASSES)
    r.holding(optimizer=torch.optim.Adam([*r.net.parameters(), *outside.parameters()]))


@refused("loads with assign=True")
def a_load_that_replaces_the_parameters(r):
    """The optimizer goes on with the old ones: in plain PyTorch training stops without a word."""
    r.update(r.next())
    r.net.load_state_dict({name: each / 2 for name, each in r.net.state_dict().items()}, assign=True)
    r.next().mean_loss(r.loss)


@refused("found Adam outside")
def an_optimizer_that_is_not_in_the_state(r):
    r.update(r.holding(), torch.optim.Adam(r.net.parameters()))


@allowed
def optimizers_of_the_state_that_take_turns(r):
    """And each step makes one without a state of its own."""
    second = torch.optim.Adam(r.net.parameters())
    for step in steps(ALONE, State(net=r.net, first=r.optimizer, second=second)):
        r.update(step, r.optimizer if step.number < 3 else second)
        torch.optim.SGD(r.net.parameters(), lr=1e-3 / step.number).step()


@refused(r"hold the learning rate schedule of its SGD.*scheduler=scheduler")
def a_schedule_that_is_not_in_the_state(r):
    schedule = StepLR(r.optimizer, 2)
    r.next()
    assert schedule


@allowed
def an_optimizer_of_a_probe(r):
    """Fitted in the loop from the features of the moment, and kept nowhere."""
    probe = nn.Linear(CLASSES, 1)
    of_probe = torch.optim.Adam(probe.parameters())
    for step in itertools.islice(r.coming, 2):
        r.update(step)
        of_probe.zero_grad()
        probe(torch.ones(2, CLASSES)).sum().backward()
        of_probe.step()
