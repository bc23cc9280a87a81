"""What a resume would lose is refused, and wrappers of the recipe's own are left alone."""

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.optim.lr_scheduler import ChainedScheduler, StepLR

from elastic.errors import UsageError
from elastic.train.state.state import State


def net_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


def loss_of(net):
    return lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1])


def train(state, net, update, scaler=None):
    for step in steps(ALONE, state):
        step.mean_loss(loss_of(net), scaler)
        update()


def test_a_module_that_is_trained_and_not_in_the_state_is_refused_at_the_loops_begin():
    """After a resume its weights would be fresh random ones, with the old moments."""
    net, head = net_of(), nn.Linear(CLASSES, CLASSES)
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()])
    with pytest.raises(UsageError, match=r"found one of shape \[3, 3\] that no object"):
        next(steps(ALONE, State(net=net, optimizer=optimizer)))


def test_a_load_that_replaces_the_parameters_is_refused_since_the_optimizer_has_the_old_ones():
    """In plain PyTorch training stops there without a word; after a resume it would go on."""
    net = net_of()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    coming = steps(ALONE, State(net=net, optimizer=optimizer))
    next(coming).mean_loss(loss_of(net))
    optimizer.step()
    net.load_state_dict({name: each / 2 for name, each in net.state_dict().items()}, assign=True)
    with pytest.raises(UsageError, match="without assign=True"):
        next(coming).mean_loss(loss_of(net))


def test_an_optimizer_with_momenta_that_is_not_in_the_state_is_refused_at_its_first_step():
    net = net_of()
    optimizer = torch.optim.Adam(net.parameters())
    with pytest.raises(UsageError, match="found Adam outside"):
        train(State(net=net), net, optimizer.step)


def test_an_optimizer_that_the_loop_builds_again_is_refused_with_what_to_write_instead():
    """A process that resumes in step 3 would go on with the first one."""
    net = net_of()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in steps(ALONE, State(net=net, optimizer=optimizer)):
        if step.number == 2:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        step.mean_loss(loss_of(net))
        if step.number == 2:
            break
        optimizer.step()
    with pytest.raises(UsageError, match="change groups in place"):
        optimizer.step()


def test_optimizers_of_the_state_may_take_turns_and_each_step_may_make_one_of_its_own():
    """Two kinds over the same parameters, and one without a state for one update."""
    net = net_of()
    first, second = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.Adam(net.parameters())
    for step in steps(ALONE, State(net=net, first=first, second=second)):
        step.mean_loss(loss_of(net))
        (first if step.number < 3 else second).step()
        torch.optim.SGD(net.parameters(), lr=1e-3 / step.number).step()


class Climber(torch.optim.Optimizer):
    """SAM, as it is usually written: its state_dict leaves out that of the optimizer inside."""

    def __init__(self, parameters, base, **options):
        super().__init__(parameters, {})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def step(self):
        self.base_optimizer.step()


def test_the_momenta_inside_a_wrapping_optimizer_are_refused_unless_they_are_saved():
    net = net_of()
    optimizer = Climber(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(UsageError, match="found SGD outside"):
        train(State(net=net, optimizer=optimizer), net, optimizer.step)
    net = net_of()
    optimizer = Climber(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    train(State(net=net, optimizer=optimizer, base=optimizer.base_optimizer), net, optimizer.step)


def test_a_schedule_that_is_not_in_the_state_is_refused_at_the_loops_begin():
    net = net_of()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 2)
    with pytest.raises(UsageError, match=r"hold the learning rate schedule of its SGD.*scheduler=scheduler"):
        next(steps(ALONE, State(net=net, optimizer=optimizer)))
    next(steps(ALONE, State(net=net, optimizer=optimizer, schedule=schedule)))
    next(steps(ALONE, State(net=net, optimizer=optimizer, schedule=ChainedScheduler([schedule]))))


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_scaler_that_is_in_use_and_not_in_the_state_is_refused(is_enabled):
    net = net_of()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)
    step = next(steps(ALONE, State(net=net, optimizer=optimizer)))
    if is_enabled:
        with pytest.raises(UsageError, match=r"hold the GradScaler.*scaler=scaler"):
            step.mean_loss(loss_of(net), scaler)
    else:
        step.mean_loss(loss_of(net), scaler)


class Trainer:
    """An object of the recipe's own that holds everything, and saves copies."""

    def __init__(self):
        self.net = net_of()
        self.parts = {"optimizer": torch.optim.AdamW(self.net.parameters(), lr=0.01)}
        self.parts["scheduler"] = StepLR(self.parts["optimizer"], 2)
        self.scaler = torch.amp.GradScaler("cpu")

    def state_dict(self):
        return {
            "net": {name: value.clone() for name, value in self.net.state_dict().items()},
            **{name: part.state_dict() for name, part in self.parts.items()},
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state):
        raise NotImplementedError

    def update(self):
        self.scaler.step(self.parts["optimizer"])
        self.scaler.update()
        self.parts["scheduler"].step()


def test_what_an_object_of_the_recipes_own_holds_is_saved_by_it(ranks):
    """Its BatchNorm's buffers are put back for each shard as well."""
    alone = ranks.run(1, train_a_trainer)
    assert ranks.run(3, train_a_trainer) == alone * 3


def train_a_trainer(member):
    trainer = Trainer()
    for step in steps(member, State(trainer=trainer)):
        step.mean_loss(loss_of(trainer.net), trainer.scaler)
        trainer.update()
    return [float(value.double().sum()).hex() for value in trainer.net.state_dict().values()]
