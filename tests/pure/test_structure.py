"""What an object holds is found in lists of any length, at a price that no step notices."""

import torch
from torch import nn

from elastic.train.state import structure
from elastic.train.state.state import State


class Holding:
    """An object of the recipe's own."""

    def __init__(self, items):
        self.items = items

    def state_dict(self):
        return {}

    def load_state_dict(self, _state):
        pass


def test_parameters_in_a_long_list_are_found():
    """An optimizer of the recipe's own holds all parameters of a large model, and moments."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(200)]
    holding = Holding([torch.zeros(1), *parameters, *(torch.zeros(1) for _ in range(200))])
    assert structure.same([p for p in structure.held(holding) if isinstance(p, nn.Parameter)], parameters)
    assert structure.same(State(mine=holding).trained, parameters)


def test_a_memory_of_many_tensors_is_not_walked_through():
    """A replay buffer: each walk yielded every tensor of it, several times in each step."""
    holding = Holding([torch.zeros(1) for _ in range(1000)])
    assert structure.same(list(structure.held(holding)), [holding, holding.items])


def test_what_stands_in_a_short_list_is_found():
    """A list of models beside a tensor."""
    models = [nn.Linear(1, 1) for _ in range(3)]
    assert State(mine=Holding([torch.zeros(1), *models])).modules == models
