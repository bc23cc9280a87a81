"""A drill flips one bit, of what it names, and autograd does not notice."""

import pytest
import torch
from torch import nn

from elastic.errors import UsageError
from elastic.train.loop.flip import flip, flip_bit
from elastic.train.state.state import State


def bytes_of(tensor):
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return bytes(memory.numpy())


def flipped_bits(before, after):
    return sum((a ^ b).bit_count() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_one_bit_of_the_tensors_own_memory_changes(dtype):
    """It is a view in the middle of more memory, transposed; and a single number."""
    memory = torch.ones(60, dtype=dtype)
    for tensor in (memory[20:40].view(4, 5).T, memory[59]):
        before, version = bytes_of(memory), tensor._version
        values = tensor.clone()
        flip_bit(tensor)
        assert flipped_bits(before, bytes_of(memory)) == 1
        assert (tensor != values).sum() == 1
        assert tensor._version == version


def trained():
    """A model of two layers after one update with momentum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, State(model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("target", "entry"),
    [("parameters", "model.0.weight"), ("optimizer", "optimizer.state.0.momentum_buffer")],
)
def test_the_largest_tensor_of_parameters_or_optimizer_changes(target, entry):
    _, _, state = trained()
    before = {name: tensor.clone() for name, tensor in state.flatten().tensors.items()}
    flip(state, target)
    after = state.flatten().tensors
    assert [name for name in before if not torch.equal(before[name], after[name])] == [entry]


def test_the_gradient_of_one_backward_changes_and_no_later_one():
    """As if the arithmetic had been wrong once."""
    model, _, state = trained()
    gradients = []
    for flips in (False, True, False):
        if flips:
            flip(state, "gradient")
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    right, wrong, again = gradients
    assert [int((a != b).sum()) for a, b in zip(right, wrong, strict=True)] == [1, 0, 0, 0]
    assert all(torch.equal(a, b) for a, b in zip(right, again, strict=True))


def test_an_optimizer_without_state_is_named():
    model = nn.Linear(2, 1)
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="expected optimizer to flip a bit in"):
        flip(state, "optimizer")
