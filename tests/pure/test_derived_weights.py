"""What hooks of torch compute from parameters is that of the parameters as they are."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from elastic.train.step.contract import compute_again

warnings.filterwarnings("ignore", category=FutureWarning)


def pruned(layer):
    prune.random_unstructured(layer, "weight", 0.5)
    return prune.l1_unstructured(layer, "weight", 2)  # a container of two methods


MAKERS = {"weight norm": weight_norm, "spectral norm": spectral_norm, "pruning": pruned}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_weight_from_a_hook_is_of_the_current_parameters(kind):
    """An update writes the parameters in place; the weight is still of those before."""
    layer = MAKERS[kind](nn.Linear(4, 3)).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.5).add_(torch.randn_like(parameter))
    stale = layer.weight.detach().clone()

    compute_again([nn.ReLU(), layer])

    found = layer.weight
    layer(torch.ones(1, 4))
    assert not torch.equal(found, stale)
    assert torch.equal(found, layer.weight)
    assert found.requires_grad


def test_buffers_and_modules_without_such_hooks_stay_as_they_are():
    """The power iteration belongs to forwards; a hook of the recipe's own may count."""
    layer, plain, calls = spectral_norm(nn.Linear(4, 3)), nn.Linear(4, 3), []
    plain.register_forward_pre_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(dict(layer.named_buffers()))
    weight = plain.weight

    compute_again([layer, plain])

    assert all(torch.equal(now, before[name]) for name, now in layer.named_buffers())
    assert plain.weight is weight
    assert not calls
