"""A model that the loop reshapes is refused, unless it loads what it has become."""

import pytest
import torch
from saved_state import saved
from torch import nn
from torch.nn.utils import prune

from elastic.errors import StateNotSavable
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State


def begun(model, **objects):
    state = State(model=model, **objects)
    state.begin()
    return state


def grow(model):
    model.append(nn.Linear(2, 2))


def widen(model):
    model[0] = nn.Linear(2, 3)


def shrink(model):
    model[1].running_mean.data = torch.zeros(1)


def add_buffer(model):
    model[0].register_buffer("cache", torch.zeros(4))


def cut(model):
    prune.l1_unstructured(model[0], "weight", 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (grow, r"model\.2\.bias: expected no such tensor, as when the loop began, found the shape \[2\]"),
        (widen, r"model\.0\.bias: expected the shape \[2\], .* found the shape \[3\]"),
        (shrink, r"model\.1\.running_mean: expected the shape \[2\], .* found the shape \[1\]"),
        (add_buffer, r"model\.0\.cache: .* or with persistent=False"),
        (cut, r"model\.0\.weight: .* found no such tensor\. .*prune\.identity\(layer, 'weight'\) at the top"),
    ],
)
def test_a_model_that_the_loop_reshapes_is_refused_when_its_state_is_taken(change, words):
    """It would train to the end, and no process could resume it: exit 76 after the first kill."""
    state = begun(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    state.flatten()
    change(state.objects["model"])
    with pytest.raises(StateNotSavable, match=f"state entry {words}"):
        state.flatten()


def test_a_module_that_is_swapped_for_one_of_its_shape_is_followed():
    state = begun(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    state.objects["model"][0] = nn.Linear(2, 2)
    state.objects["model"][0].register_buffer("cache", torch.zeros(4), persistent=False)
    assert "model.0.weight" in state.flatten().tensors


def test_masks_that_were_there_from_the_start_are_followed():
    """What the refusal advises for pruning."""
    kept = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3))
        prune.identity(model[0], "weight")
        kept.append(begun(model))
    state, other = kept
    prune.l1_unstructured(state.objects["model"][0], "weight", 2)
    other.load(saved(state))
    assert checksum_of(other.flatten()) == checksum_of(state.flatten())


class Growing(nn.Module):
    """It builds the layers that a saved state has, as the refusal advises."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def load_state_dict(self, state_dict, *args, **options):
        while f"layers.{len(self.layers)}.weight" in state_dict:
            self.layers.append(nn.Linear(2, 2))
        return super().load_state_dict(state_dict, *args, **options)


def test_a_model_that_builds_what_it_loads_may_grow_with_its_optimizer():
    """A layer and its group are added in the loop; after a restart both are there, and go on."""

    def make():
        torch.manual_seed(0)
        model = Growing()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        state = begun(model, optimizer=optimizer)

        def step():
            optimizer.zero_grad()
            model(torch.ones(3, 2)).square().sum().backward()
            optimizer.step()

        return state, step

    state, step = make()
    step()
    layer = nn.Linear(2, 2)
    state.objects["model"].layers.append(layer)
    state.objects["optimizer"].add_param_group({"params": list(layer.parameters()), "lr": 0.01})
    step()
    other, other_step = make()
    other.load(saved(state))
    step(), other_step()
    assert checksum_of(other.flatten()) == checksum_of(state.flatten())
