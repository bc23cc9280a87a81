"""A state is loaded into what was built alike alone, with what the loop made of it since."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_state import saved
from torch import nn
from torch.nn.utils import prune
from torch.optim.lr_scheduler import CosineAnnealingLR

import elastic
from elastic.errors import CheckpointDamaged, StateNotSavable, UsageError
from elastic.train.state.built import Structure, check_alike, structure_of
from elastic.train.state.flat import FlatState, checksum_of
from elastic.train.state.state import State


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
    return begun(model, optimizer=torch.optim.Adam(groups, lr=0.1))


@given(st.permutations("abcd"), st.permutations("abcd"), st.sampled_from([[], [1], [2], [1, 3]]))
def test_a_state_loads_where_the_order_is_that_of_the_save(before, now, cuts):
    """A set of names iterates otherwise in another process; the shapes are all the same."""
    kept = saved(grouped(before, cuts))
    if before == now:
        grouped(now, cuts).load(kept)
    else:
        with pytest.raises(UsageError, match="never from a set"):
            grouped(now, cuts).load(kept)


def test_names_of_tied_and_loose_parameters_are_stable():
    """A tied one has its first name. One of no module has its own, if the recipe gave names."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    scale, shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([model["b"].weight, scale])
    named = torch.optim.SGD([("shift", shift)])
    found = structure_of({"model": model, "optimizer": optimizer, "zz": named}).groups
    assert found == {"optimizer": [["model.a.weight", "a parameter of shape [1]"]], "zz": [["shift"]]}


def unfrozen_in_the_loop(order="abcd"):
    """Only the first two are trained at first. `grow` is what the loop does in one step alone."""
    model = net()
    for name in order[2:]:
        model[name].requires_grad_(False)
    optimizer = torch.optim.Adam([model[name] for name in order[:2]], lr=0.1)

    def step():
        optimizer.zero_grad()
        sum((p**2).sum() for p in model.parameters() if p.requires_grad).backward()
        optimizer.step()

    def grow():
        model["c"].requires_grad_(True)
        optimizer.add_param_group({"params": [model["c"]], "lr": 0.01})

    return begun(model, optimizer=optimizer), step, grow


def test_what_a_step_unfroze_and_added_survives_a_restart():
    """`if step.number == 4: unfreeze()` is not run again by a loop that goes on at step 6."""
    state, step, grow = unfrozen_in_the_loop()
    step(), grow(), step()
    kept = saved(state)
    other, other_step, _ = unfrozen_in_the_loop()
    other.load(kept)
    model = other.objects["model"]
    assert [model[name].requires_grad for name in "abcd"] == [True, True, True, False]
    assert len(other.objects["optimizer"].param_groups) == 2
    step(), other_step()
    assert checksum_of(other.flatten()) == checksum_of(state.flatten())


def test_a_module_that_a_step_put_into_eval_mode_stays_there():
    """A backbone's BatchNorm, for instance. A recipe that was edited to do so at once means it."""

    def make():
        return begun(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))

    state, other, edited = make(), make(), make()
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
    schedule = CosineAnnealingLR(optimizer, T_max=steps)
    return begun(model, optimizer=optimizer, schedule=schedule, values=elastic.Values(patience=patience))


def test_edited_settings_are_told_and_have_no_effect():
    """An optimizer, a schedule and plain values; nothing is told at an ordinary restart, nor again
    once the state was saved under the edited recipe.
    """
    state = with_settings()
    same = with_settings()
    same.load(saved(state))
    assert same.ignored == []
    edited = with_settings(lr=0.001, patience=5, steps=20)
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
    ("change", "words"),
    [
        ({"groups": {"o": [["m.b", "m.a"]]}}, r"expected m\.a in group 0, as on rank 0"),
        ({"frozen": ["m.a"]}, r"rank 1 .* m\.a \(frozen\)"),
        ({"evaluating": ["m"]}, r"m \(training mode\)"),
        ({"settings": {"o.lr": "0.2"}}, "o.lr 0.1, not 0.2"),
    ],
)
def test_ranks_that_build_differently_are_refused(change, words):
    first = {"groups": {"o": [["m.a", "m.b"]]}, "frozen": [], "settings": {"o.lr": "0.1"}}
    check_alike([Structure(**first)] * 3)
    with pytest.raises(UsageError, match=words):
        check_alike([Structure(**first), Structure(**(first | change))])


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
