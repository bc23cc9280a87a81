"""Parameters that no optimizer of torch holds: their gradients are those of plain PyTorch."""

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, samples, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.errors import UsageError
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def loss_of(net):
    return lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1])


class Lion:
    """An optimizer that derives from nothing and that no State holds."""

    def __init__(self, parameters, how):
        self.parameters, self.how = list(parameters), how

    def step(self):
        for p in self.parameters:
            match self.how:
                case "data":
                    p.data -= 0.1 * p.grad.sign()
                case "no_grad":
                    with torch.no_grad():
                        p.sub_(0.1 * p.grad.sign())
                case "assigned":
                    p.data = p.data - 0.1 * p.grad.sign()


HOWS = ["data", "no_grad", "assigned"]


def trains(member, how, form, first=1, beside=True):
    """The state and the bits of each step's norm over all parameters.

    beside: an optimizer of torch holds the last layer.
    """
    net, average = layers(), layers()
    own = Lion(net[0].parameters() if beside else net.parameters(), how)
    objects = {"net": net, "average": average}
    if beside:
        objects["optimizer"] = torch.optim.SGD(net[2].parameters(), lr=0.1, momentum=0.9)
    norms, state = [], State(**objects)
    for step in steps(member, state, first=first):
        assert [p.grad for p in net.parameters()] == [None] * 4
        if form == "sum":
            penalty = 1e-3 * net[0].weight.square().sum()
            step.backward(step.sum(loss_of(net)) / step.shards + penalty)
        else:
            step.mean_loss(loss_of(net))
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item().hex())
        own.step()
        if beside:
            objects["optimizer"].step()
        assert [p.grad for p in average.parameters()] == [None] * 4
    return [checksum_of(state.flatten()).whole, norms]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("form", ["mean", "sum"])
def test_an_optimizer_of_the_recipes_own_gets_the_sum_of_all_shards(ranks, how, form):
    """Beside one of torch, and unknown to the State. The first computation of a process does not
    know yet which of the parameters a backward reaches; the bits are those of all later ones.
    """
    alone = ranks.run(1, trains, how, form)
    for world_size in (2, 3):
        assert ranks.run(world_size, trains, how, form) == alone * world_size


@pytest.mark.parametrize("how", HOWS)
def test_a_recipe_without_any_optimizer_of_torch_updates_by_hand(ranks, how):
    """Also through .data, which no version counts: it was told that no optimizer had used them."""
    alone = ranks.run(1, trains, how, "mean", 1, False)
    assert ranks.run(3, trains, how, "mean", 1, False) == alone * 3


def gradients(member, used, frozen):
    """In each step, the bits of all gradients. used: whether an optimizer holds the first layer."""
    net = layers()
    net[0].bias.requires_grad_(not frozen)
    held = net.parameters() if used else net[2].parameters()
    optimizer = torch.optim.SGD(held, lr=0.0)
    found = []
    for step in steps(member, State(net=net, optimizer=optimizer)):
        # A layer that only some shards use, on whichever rank.
        step.mean_loss(
            lambda batch: F.cross_entropy(
                net[2](net[:2](batch.data[0]) if batch.shard == 5 else torch.ones(len(batch.data[0]), 8)),
                batch.data[1],
            )
        )
        found.append(
            [None if p.grad is None else p.grad.view(torch.int32).sum().item() for p in net.parameters()]
        )
        optimizer.step()
    return found


def test_a_gradient_has_the_same_bits_whether_or_not_an_optimizer_holds_its_parameter(ranks):
    for frozen in (False, True):
        expected = ranks.run(1, gradients, True, frozen)
        for world_size in (1, 2, 3):
            assert ranks.run(world_size, gradients, False, frozen) == expected * world_size


def test_it_is_the_gradient_of_the_whole_batch():
    net = layers()
    optimizer = torch.optim.SGD(net[2].parameters(), lr=0.1)
    step = next(steps(ALONE, State(net=net, optimizer=optimizer)))
    indices = torch.cat([batch.indices for batch in step._batches])
    x, y = samples().tensors
    expected = torch.autograd.grad(F.cross_entropy(net(x[indices]), y[indices]), list(net.parameters()))
    step.mean_loss(loss_of(net))
    for p, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)


def test_a_second_computation_of_a_step_adds_to_an_unused_gradient_and_replaces_a_used_one():
    """As a second backward in plain PyTorch, without zero_grad; a used one is not wanted again."""
    net = layers()
    for step in steps(ALONE, State(net=net)):
        step.mean_loss(loss_of(net))
        once = [p.grad.clone() for p in net.parameters()]
        kept = net[0].weight.grad
        step.mean_loss(loss_of(net))
        for p, gradient in zip(net.parameters(), once, strict=True):
            assert torch.equal(p.grad, 2 * gradient)
        assert torch.equal(kept, once[0])
        for p in net.parameters():
            p.data -= 0.0001 * p.grad
        step.mean_loss(loss_of(net))
        for p, gradient in zip(net.parameters(), once, strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=0.1, atol=0.01)
        for p in net.parameters():
            p.data -= 0.1 * p.grad


@pytest.mark.parametrize("how", HOWS)
def test_an_own_optimizer_that_accumulates_over_steps_is_refused(how):
    """At the end of a step its gradients go. A write through .data is told from one that changed
    nothing, as with a learning rate of 0, only at its second time.
    """
    net = layers()
    own, said, done = Lion(net.parameters(), how), "", 0
    try:
        for step in steps(ALONE, State(net=net), epochs=4):
            step.mean_loss(loss_of(net))
            if step.number % 2 == 0:
                own.step()
            step._parts.contract.end_step()  # as the loop does, which knows then that it is done
            done = step.number
    except UsageError as error:
        said = str(error)
    assert f"gradients since step {done} were not used" in said
    assert "elastic.start(global_batch=48, shards=16) for k = 2" in said
    assert done == (3 if how == "data" else 1)


@pytest.mark.parametrize("copy", ["load", "data"])
def test_a_target_network_that_backward_reaches_and_the_loop_copies_now_and_then_is_named_once(copy):
    """Its gradients are computed for nothing, as in plain PyTorch; an optimizer of torch trains. A
    script without `no_grad` around the target is ordinary.
    """
    net, target = layers(), layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    said = []
    for step in steps(ALONE, State(net=net, target=target, optimizer=optimizer), epochs=4):
        step.mean_loss(lambda batch: F.mse_loss(net(batch.data[0]), 1 + target(batch.data[0])))
        optimizer.step()
        if step.number % 3 == 0:
            if copy == "load":
                target.load_state_dict(net.state_dict())
            else:
                for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                    slow.data.copy_(fast.data)
        assert not step._parts.contract.has_waiting_gradients()
        said.append(step._parts.contract.end_step())
    assert step.number == 8
    (note,) = filter(None, said)
    assert "freeze the parameters by requires_grad_(False)" in note


@pytest.mark.parametrize("drop", ["none", "zero"])
def test_gradients_that_are_dropped_in_their_step_are_no_accumulation(drop):
    net = layers()
    own = Lion(net.parameters(), "no_grad")
    for step in steps(ALONE, State(net=net), epochs=4):
        step.mean_loss(loss_of(net))
        if step.number % 2 == 0:
            own.step()
        else:
            net.zero_grad(set_to_none=drop == "none")
    assert step.number == 8


def test_a_gradient_from_before_the_loop_is_refused_without_an_optimizer_too():
    net = layers()
    net(torch.ones(2, FEATURES)).sum().backward()
    with pytest.raises(UsageError, match=r"net\.0\.weight has a gradient from before the loop"):
        next(steps(ALONE, State(net=net))).mean_loss(loss_of(net))


def test_a_copy_that_no_backward_reaches_is_not_exchanged():
    """Averaged weights and target networks require gradients as a rule, and never have one."""
    net, average = layers(), layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in steps(ALONE, State(net=net, average=average, optimizer=optimizer)):
        step.mean_loss(loss_of(net))
        optimizer.step()
        parameters = {id(p) for p in step._parts.gradients._layout.parameters}
        assert parameters == set(map(id, net.parameters()))
