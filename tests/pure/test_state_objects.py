"""Real objects of training are put together exactly, and go on as if they had never been
interrupted.
"""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from elastic.snapshot import image
from elastic.train.state import FlatState, State, checksum_of


def through_bytes(parts):
    """As a checkpoint keeps it: an image, read again."""
    layout = image.layout(parts.tensors, parts.document)
    body = bytearray(layout.size_bytes)
    image.copy_into(layout, memoryview(body))
    tensors, document = image.read(body)
    return FlatState(tensors=tensors, document=document)


def tied():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False))
    net[3].weight = net[0].weight
    return net


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "adam-groups": lambda p: torch.optim.Adam([{"params": p[:1], "lr": 0.5}, {"params": p[1:]}], lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=9),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=20),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, milestones=[1, 2, 7]),
    "warmup": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    # At the handover torch asks the second one for its closed form.
    "handover": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, milestones=[1])], milestones=[3]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
}


def training(optimizer, scheduler):
    """A recipe's objects, and what one step does to them."""
    net = tied()
    objects = {"net": net, "optimizer": OPTIMIZERS[optimizer](list(net.parameters()))}
    objects["scheduler"] = SCHEDULERS[scheduler](objects["optimizer"])
    objects["plateau"] = lr_scheduler.ReduceLROnPlateau(
        torch.optim.SGD(net.parameters(), lr=0.1)
    )  # `best` is infinite
    objects["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0)
    objects["ema"] = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    draw = torch.Generator().manual_seed(1)

    def step():
        objects["optimizer"].zero_grad()
        loss = net(torch.randint(5, (6,), generator=draw)).square().mean()
        objects["scaler"].scale(loss).backward()
        objects["scaler"].step(objects["optimizer"])
        objects["scaler"].update()
        objects["scheduler"].step()
        objects["ema"].update_parameters(net)

    return State(**objects), step, draw


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        ("sgd", "cosine"),
        ("sgd", "onecycle"),
        ("adamw", "multistep"),
        ("adam-groups", "lambda"),
        ("adagrad", "warmup"),
        ("sgd", "handover"),
    ],
)
def test_real_objects_go_on_as_if_never_interrupted(optimizer, scheduler):
    """Two steps, save, two more; fresh objects that went elsewhere first load the save and do the
    same two.
    """
    state, step, draw = training(optimizer, scheduler)
    step(), step()
    saved = through_bytes(state.flatten())
    place = draw.get_state()
    step(), step()

    other, other_step, other_draw = training(optimizer, scheduler)
    for _ in range(3):
        other_step()
    other.load(saved)
    assert checksum_of(other.flatten()) == checksum_of(saved)
    other_draw.set_state(place)
    other_step(), other_step()
    assert checksum_of(other.flatten()) == checksum_of(state.flatten())


def test_chained_schedulers_with_a_tensor_as_learning_rate_resume():
    """They keep the optimizer's tensor under several names. Fresh objects load the step where one
    scheduler hands over to the next.
    """
    state, step, _ = training("adamw", "warmup")
    step(), step()
    saved = through_bytes(state.flatten())
    fresh, _, _ = training("adamw", "warmup")
    fresh.load(saved)
    assert checksum_of(fresh.flatten()) == checksum_of(saved)


def test_training_on_after_loading_leaves_what_was_loaded_alone():
    """An optimizer may keep the tensors that it is given; two names of one tensor must not become
    one memory either.
    """
    state, step, _ = training("adamw", "cosine")
    step()
    saved = through_bytes(state.flatten())
    before = checksum_of(saved)
    state.load(saved)
    step()
    assert checksum_of(saved) == before


class Versioned(nn.Linear):
    """As torchvision's MNASNet: it loads nothing without its version."""

    _version = 2

    def _load_from_state_dict(self, values, prefix, metadata, *others):
        if metadata.get("version") not in (1, 2):
            raise ValueError("expected version 1 or 2")
        super()._load_from_state_dict(values, prefix, metadata, *others)


def test_a_layer_that_depends_on_its_version_loads():
    net = nn.Sequential(Versioned(2, 2))
    other = nn.Sequential(Versioned(2, 2))
    State(net=other).load(through_bytes(State(net=net).flatten()))
    assert torch.equal(other[0].weight, net[0].weight)


class Average:
    """An average that a recipe keeps by itself, from the state of its module."""

    def __init__(self, net):
        self.net = net

    def state_dict(self):
        return {"net": self.net.state_dict(), "steps": 3}

    def load_state_dict(self, state_dict):
        self.net.load_state_dict(state_dict["net"])


def test_the_state_of_a_module_inside_another_object_loads():
    saved = through_bytes(State(ema=Average(tied())).flatten())
    other = State(ema=Average(nn.Sequential(*(each.requires_grad_(False) for each in tied()))))
    other.load(saved)
    assert checksum_of(other.flatten()) == checksum_of(saved)


def test_tied_weights_are_kept_once_and_stay_tied():
    """The image has the bytes once; the second name refers to the first one."""
    net = tied()
    parts = State(net=net).flatten()
    assert b'net.3.weight":{' not in image.layout(parts.tensors, None).head
    other = tied()
    State(net=other).load(through_bytes(parts))
    assert other[3].weight is other[0].weight
    assert torch.equal(other[3].weight, net[0].weight)
