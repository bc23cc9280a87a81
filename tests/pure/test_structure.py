"""What an object holds is found in lists of any length, at a price that no step notices."""

import torch
from saved_state import Holder
from torch import nn

from elastic.train.state import structure
from elastic.train.state.state import State


def test_what_an_object_holds_in_lists_is_found():
    """An optimizer of the recipe's own holds all parameters of a large model, and moments; a list
    of models stands beside a tensor. A replay buffer is not walked through: each walk yielded every
    tensor of it, several times in each step.
    """
    tensors = [torch.zeros(1) for _ in range(1000)]
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(200)]
    holding = Holder([tensors[0], *parameters, *tensors[:200]])
    assert structure.same([p for p in structure.held(holding) if isinstance(p, nn.Parameter)], parameters)
    assert structure.same(State(mine=holding).trained, parameters)
    models = [nn.Linear(1, 1) for _ in range(3)]
    assert State(mine=Holder([tensors[0], *models])).modules == models
    assert not any(torch.is_tensor(each) for each in structure.held(Holder(tensors)))
