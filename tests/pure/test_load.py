"""What is loaded goes on as if it had never been interrupted: real objects of training, with what
the loop made of them since; a load that is not exact is refused where the run begins.
"""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_state import Holder, saved
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim import lr_scheduler

from elastic import State, Values
from elastic.errors import CheckpointDamaged, StateDoesNotFit, StateNotSavable, UsageError
from elastic.proof.evidence import differences
from elastic.snapshot import image
from elastic.train.state.flat import BOUNDARY, FlatState, alignment, checksum_of

STEPS, LOADED_AFTER = 12, 5


OPTIMIZERS = {
    "SGD": {"momentum": 0.9},  # strides
    "AdamW": {"amsgrad": True, "lr": torch.tensor(0.01)},
    "NAdam": {},  # dtypes
    "ASGD": {"t0": 1.0},
    "Adafactor": {},  # shapes
    "Adagrad": {},
    "LBFGS": {"max_iter": 2},  # lists
}


def chained(optimizer):
    """Two schedulers, each of which has a part in the rate."""
    warm = lr_scheduler.LinearLR(optimizer, total_iters=4)
    then = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
    return lr_scheduler.SequentialLR(optimizer, [warm, then], milestones=[5])


SCHEDULERS = {
    "a function": partial(lr_scheduler.LambdaLR, lr_lambda=lambda count: 0.9**count),
    "a Counter": partial(lr_scheduler.MultiStepLR, milestones=[1, 5, 6, 7]),
    "schedulers inside": chained,
    "an infinity": partial(lr_scheduler.ReduceLROnPlateau, patience=1, cooldown=1),
    "settings in the groups": partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=STEPS),
}


def fitted(dtype, name="SGD", schedule=None):
    """A net with channels_last weights, where the optimizer takes them, and a step of it, which
    gives the rate that it was made with.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6, bias=False)).to(dtype)
    if name != "LBFGS":
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))
        net.to(dtype, memory_format=torch.channels_last)
    optimizer = getattr(torch.optim, name)(net.parameters(), **{"lr": 0.01} | OPTIMIZERS[name])
    objects = {} if schedule is None else {"scheduler": SCHEDULERS[schedule](optimizer)}

    def step(number):
        draw = torch.Generator().manual_seed(number)
        inputs = torch.randn((2, 3, 6, 6), generator=draw).to(dtype)

        def closure():
            optimizer.zero_grad()
            loss = net(inputs).square().mean()
            loss.backward()
            return loss

        rate = float(optimizer.param_groups[0]["lr"])
        optimizer.step(closure)
        for each in objects.values():
            each.step(*[1.0] * (schedule == "an infinity"))
        return rate

    return State(net=net, optimizer=optimizer, **objects), step


def names_in(optimizer):
    """What a recipe may have looked up: groups, their lists, and the state of each parameter."""
    groups, of_parameters = optimizer.param_groups, optimizer.state
    tensors = [each for one in of_parameters.values() for each in one.values() if torch.is_tensor(each)]
    lists = [group["params"] for group in groups]
    return [groups, *groups, *lists, of_parameters, *of_parameters.values(), *tensors]


CASES = [(torch.bfloat16, name, None) for name in OPTIMIZERS]
CASES += [(torch.float64, "NAdam", None), (torch.float64, "ASGD", None)]
CASES += [(torch.float32, "SGD", name) for name in SCHEDULERS]


@pytest.mark.parametrize(("dtype", "optimizer", "schedule"), CASES)
def test_optimizers_and_schedules_go_on_exactly(dtype, optimizer, schedule):
    """NAdam and ASGD keep float32 numbers beside bfloat16 and float64 parameters, to which their
    load_state_dict rounds them. Momenta that came back row-major could round otherwise. The save is
    where one schedule of a sequence hands over to the next; what is loaded into went elsewhere
    first, and names for its parts stay.
    """
    state, step = fitted(dtype, optimizer, schedule)
    for number in range(LOADED_AFTER):
        step(number)
    kept = saved(state)
    other, other_step = fitted(dtype, optimizer, schedule)
    other_step(1)
    before = names_in(other.objects["optimizer"])
    other.load(kept)
    if optimizer != "LBFGS":
        after = names_in(other.objects["optimizer"])
        assert all(one is its for one, its in zip(before, after, strict=True))
    expected, found = state.flatten().tensors, other.flatten().tensors
    assert [(each.dtype, each.stride()) for each in found.values()] == [
        (each.dtype, each.stride()) for each in expected.values()
    ]
    rates = [step(number) for number in range(LOADED_AFTER, STEPS)]
    assert [other_step(number) for number in range(LOADED_AFTER, STEPS)] == rates
    assert checksum_of(other.flatten()) == checksum_of(state.flatten())
    assert schedule is None or len(set(rates)) > 1


def test_a_buffer_comes_back_with_the_strides_of_training():
    """A product with it may round otherwise if it is row-major again. Of two views that share
    memory, neither is torn from it.
    """
    net, other = nn.Module(), nn.Module()
    for each in (net, other):
        each.register_buffer("mean", torch.zeros(2, 3))
    net.mean = torch.arange(6.0).view(3, 2).t()
    State(net=other).load(saved(State(net=net)))
    assert other.mean.stride() == (1, 2) and torch.equal(other.mean, net.mean)
    other.whole = torch.zeros(4, 3)
    other.mean = other.whole[:2]
    with pytest.raises(StateDoesNotFit, match=r"net\.mean: saved .* strides \(1, 2\).*; now .* row-major"):
        State(net=other).load(saved(State(net=net)))


# A trial load, where the run begins.


def looking(slow=lambda parameters: [each.detach().clone() for each in parameters], load=list):
    """Beside a net, an object that keeps slow weights. slow: of them. load: of what was saved."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    look = Holder({"slow": slow(list(net.parameters()))}, lambda state: {"slow": load(state["slow"])})
    return State(net=net, optimizer=optimizer, look=look)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"load": lambda slow: {}["fast_state"]}, "look does not take it: 'fast_state'"),
        ({"load": lambda slow: [each.half().float() for each in slow]}, r"the tensor look\.slow\.0: saved"),
        # The weights of the model itself, until a load copies them.
        (
            {"slow": list, "load": lambda slow: [nn.Parameter(each.clone()) for each in slow]},
            r"(look|net)\..*: saved .*memory of look\.slow\.\d",
        ),
    ],
    ids=["refuses", "rounds", "torn"],
)
def test_an_object_with_an_inexact_load_is_refused_at_once(how, words):
    """After a kill it would be exit 76, hours later. The model keeps what it has."""
    state = looking(**how)
    before = checksum_of(State(net=state.objects["net"]).flatten())
    with pytest.raises(UsageError, match=f"a trial load .*{words}"):
        state.load_as_built()
    assert checksum_of(State(net=state.objects["net"]).flatten()) == before


def test_an_exact_load_leaves_no_trace():
    """The twin is never loaded. Drawn numbers and the tensors of modules stay where they are; a
    copy of a large model might not fit into a GPU's memory.
    """
    state, twin = looking(), looking()
    drawn = torch.get_rng_state()
    places = [each.data_ptr() for each in state.objects["net"].state_dict().values()]
    assert state.load_as_built() == checksum_of(twin.flatten())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert places == [each.data_ptr() for each in state.objects["net"].state_dict().values()]
    for each in (state, twin) * 2:
        each.objects["net"](torch.ones(3, 2)).square().sum().backward()
        each.objects["optimizer"].step()
    assert checksum_of(state.flatten()) == checksum_of(twin.flatten())


# What was built, and what the loop made of it.


def net():
    """Four parameters of one shape, which no check of shapes can tell apart."""
    torch.manual_seed(0)
    return nn.ParameterDict({name: nn.Parameter(torch.randn(2)) for name in "abcd"})


def begun(model, **objects):
    state = State(model=model, **objects)
    state.begin()
    return state


def grouped(order, cuts=()):
    """The model, and Adam with groups of its parameters in this order, cut at these places."""
    model = net()
    places = [0, *cuts, len(order)]
    groups = [{"params": [model[name] for name in order[a:b]]} for a, b in itertools.pairwise(places)]
    return begun(model, optimizer=torch.optim.Adam(groups, lr=torch.tensor(0.1)))


ORDERS = st.permutations("abcd")


@given(ORDERS, ORDERS, st.sampled_from([[], [1], [2], [1, 3]]))
def test_a_state_loads_where_the_order_is_that_of_the_save(before, now, cuts):
    """A set of names iterates otherwise in another process; the shapes are all the same."""
    kept = saved(grouped(before, cuts))
    if before == now:
        grouped(now, cuts).load(kept)
    else:
        with pytest.raises(UsageError, match="never from a set"):
            grouped(now, cuts).load(kept)


@given(ORDERS)
def test_an_optimizers_state_keeps_the_order_of_the_calm_run(order):
    """A recipe that adds up norms of momenta adds floats in that order."""
    state, other = grouped("abcd"), grouped("abcd")
    state.load_as_built()
    for name in order:  # which have their first gradients in this order
        state.objects["model"][name].square().sum().backward()
        state.objects["optimizer"].step()
    other.load(saved(state))
    for each in (state, other):
        model, optimizer = each.objects["model"], each.objects["optimizer"]
        assert [name for p in optimizer.state for name in "abcd" if model[name] is p] == list(order)
        assert list(map(list, optimizer.state.values())) == [["step", "exp_avg", "exp_avg_sq"]] * 4
    assert list(state.objects["optimizer"].param_groups[0]) == list(
        other.objects["optimizer"].param_groups[0]
    )


def test_a_module_that_a_step_put_into_eval_mode_stays_there():
    """A backbone's BatchNorm, for instance. A recipe that was edited to do so at once means it."""
    state, other, edited = (begun(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())) for _ in range(3))
    state.objects["model"][0].eval()
    other.load(saved(state))
    assert [module.training for module in other.objects["model"].modules()] == [True, False, True]
    edited.objects["model"][1].eval()
    edited.begin()
    edited.load(saved(state))
    assert [module.training for module in edited.objects["model"].modules()] == [True, True, False]


def with_settings(lr=0.1, patience=3, steps=9):
    model = net()
    optimizer = torch.optim.SGD(model.values(), lr=lr)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    return begun(model, optimizer=optimizer, schedule=schedule, values=Values(patience=patience))


def test_edited_settings_are_told_and_have_no_effect():
    """An optimizer, a schedule and plain values; nothing is told at an ordinary restart, nor again
    once the state was saved under the edited recipe.
    """
    state, same, edited = with_settings(), with_settings(), with_settings(lr=0.001, patience=5, steps=20)
    same.load(saved(state))
    assert same.ignored == []
    edited.load(saved(state))
    assert edited.ignored == [
        "optimizer.param_groups[0].lr 0.1, not 0.001",
        "optimizer.param_groups[0].initial_lr 0.1, not 0.001",
        "schedule.T_max 9, not 20",
        "schedule.base_lrs [0.1], not [0.001]",
        "values.patience 3, not 5",
    ]
    assert edited.objects["optimizer"].param_groups[0]["lr"] == 0.1
    again = with_settings(lr=0.001, patience=5, steps=20)
    again.load(saved(edited))
    assert again.ignored == []


@pytest.mark.parametrize(
    ("order", "change", "entry"),
    [
        ("bacd", nn.Module.train, "optimizer (groups)"),
        ("abcd", lambda model: model["a"].requires_grad_(requires_grad=False), "model.a (frozen)"),
        ("abcd", nn.Module.eval, "model (evaluating)"),
    ],
)
def test_what_ranks_build_differently_is_in_their_evidence(order, change, entry):
    """They compare it before the first step; the State itself is the same."""
    other = grouped(order)
    change(other.objects["model"])
    assert differences(grouped("abcd").load_as_built(), other.load_as_built()) == [entry]


def test_a_structure_that_makes_no_sense_is_damage():
    flat = saved(grouped("abcd"))
    odd = FlatState(tensors=flat.tensors, document=flat.document, about=flat.about | {"built": {"groups": 3}})
    with pytest.raises(CheckpointDamaged):
        grouped("abcd").load(odd)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.append(nn.Linear(2, 2)),
        lambda model: setattr(model, "0", nn.Linear(2, 3)),
        lambda model: model[0].register_buffer("cache", torch.zeros(4)),
        lambda model: prune.l1_unstructured(model[0], "weight", 1),
    ],
    ids=["grown", "widened", "a buffer more", "pruned"],
)
def test_a_model_that_the_loop_reshapes_is_refused(change):
    """It would train to the end, and no process could resume it: exit 76 after the first kill."""
    state = begun(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    state.flatten()
    change(state.objects["model"])
    with pytest.raises(StateNotSavable, match=r"state entry model\.\d\..*, as when the loop began, found"):
        state.flatten()


# Where a tensor begins in its memory. Torch's allocator puts memory on a boundary.


class KeepsGradients(torch.optim.Optimizer):
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["previous"] = parameter.grad


def test_a_load_puts_every_tensor_where_it_was():
    """What a step leaves behind: views of larger vectors everywhere, as parameters, a buffer, an
    optimizer's tensors; Values keep a copy. A second load does what the first did. Memory of NumPy
    lies elsewhere in each process, and counts as a boundary. The image has tied weights once, under
    their first name.
    """
    assert alignment(torch.from_numpy(np.arange(66, dtype=np.float32)[1:])) == 0

    def built():
        model = nn.Sequential(nn.Linear(13, 17), nn.Linear(17, 5), nn.Linear(13, 17, bias=False))
        model[2].weight = model[0].weight
        model.register_buffer("covariance", torch.eye(4))
        optimizer = KeepsGradients(model.parameters(), {})
        return State(net=model, optimizer=optimizer, kept=Values(rows=torch.zeros(3), one=torch.zeros(1)))

    def places(state):
        return {name: tensor.data_ptr() % BOUNDARY for name, tensor in state.flatten().tensors.items()}

    before, after, third = built(), built(), built()
    model, optimizer, kept = (before.objects[name] for name in ("net", "optimizer", "kept"))
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 2, model.parameters())
    model.covariance = torch.randn(17)[1:].view(4, 4)
    gradients = torch.randn(400)
    for parameter in model.parameters():
        parameter.grad = gradients[7 : 7 + parameter.numel()].view_as(parameter)
    optimizer.step()
    kept.rows = torch.randn(9, 3)[5]
    expected = places(before)
    assert len(set(expected.values())) > 4  # the test sees something
    assert b'net.2.weight":{' not in image.layout(before.flatten().tensors, None).head
    after.load(saved(before))
    assert places(after) == expected and checksum_of(after.flatten()) == checksum_of(before.flatten())
    third.load(saved(after))
    assert places(third) == expected
