"""A drill flips one bit, of what it names, and autograd does not notice."""

import pytest
import torch
from torch import nn

from elastic.errors import UsageError
from elastic.faults.flip import flip, flip_bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_one_bit_of_the_tensors_own_memory_changes(dtype):
    """It is a view in the middle of more memory, transposed; and a single number."""
    memory = torch.ones(60, dtype=dtype)
    for tensor in (memory[20:40].view(4, 5).T, memory[59]):
        before, values, version = memory.clone(), tensor.clone(), tensor._version
        flip_bit(tensor)
        changed = (before.view(torch.uint8) ^ memory.view(torch.uint8)).tolist()
        assert sum(each.bit_count() for each in changed) == 1
        assert (tensor != values).sum() == 1
        assert tensor._version == version


def test_the_largest_of_the_named_tensors_changes():
    named = {"parameters": [torch.ones(2), torch.ones(3)], "optimizer": [torch.ones(5)]}
    flip(named.__getitem__, "parameters")
    assert [int((each != 1).sum()) for each in (*named["parameters"], *named["optimizer"])] == [0, 1, 0]
    with pytest.raises(UsageError, match="expected optimizer to flip a bit in"):
        flip(lambda _target: [], "optimizer")


def test_the_gradient_of_one_backward_changes_and_no_later_one():
    """As if the arithmetic had been wrong once."""
    model, gradients = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), []
    for flips in (False, True, False):
        if flips:
            flip(lambda _target: model.parameters(), "gradient")
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    right, wrong, again = gradients
    assert [int((a != b).sum()) for a, b in zip(right, wrong, strict=True)] == [1, 0, 0, 0]
    assert all(torch.equal(a, b) for a, b in zip(right, again, strict=True))
