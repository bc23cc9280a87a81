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


@pytest.mark.parametrize("make", [weight_norm, spectral_norm, pruned])
def test_a_weight_from_a_hook_is_of_the_current_parameters(make):
    """An update writes the parameters in place; the weight is still of those before. The power
    iteration belongs to forwards, and a hook of the recipe's own may count.
    """
    layer, plain, calls = make(nn.Linear(4, 3)).eval(), nn.Linear(4, 3), []
    plain.register_forward_pre_hook(lambda *_: calls.append(1))
    weight, before = plain.weight, copy.deepcopy(dict(layer.named_buffers()))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.5).add_(torch.randn_like(parameter))
    stale = layer.weight.detach().clone()

    compute_again([nn.ReLU(), layer, plain])

    found = layer.weight
    assert all(torch.equal(now, before[name]) for name, now in layer.named_buffers())
    layer(torch.ones(1, 4))
    assert not torch.equal(found, stale) and torch.equal(found, layer.weight) and found.requires_grad
    assert plain.weight is weight and not calls
