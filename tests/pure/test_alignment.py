"""Each tensor of a state begins after a load where it began in its memory when it was saved.

The dumb twin of `alignment` is the address itself, which torch's allocator puts on a boundary.
"""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_state import saved
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from elastic.train.state.flat import BOUNDARY, alignment, copy_at
from elastic.train.state.state import State
from elastic.train.state.values import Values

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def address(tensor):
    return tensor.data_ptr() % BOUNDARY


@given(st.sampled_from(DTYPES), st.integers(0, 40), st.lists(st.integers(0, 5), max_size=3), st.data())
def test_an_aligned_copy_has_the_same_values_and_strides(dtype, first, shape, data):
    """Views of torch's memory, row-major or transposed; the address agrees with the offset."""
    count = int(np.prod(shape))
    memory = torch.arange(first + count).to(dtype)
    view = memory[first:].view(shape)
    if data.draw(st.booleans()):
        view = view.permute(tuple(reversed(range(view.dim()))))
    if count:
        assert alignment(view) == address(view)
    place = data.draw(st.integers(0, BOUNDARY // view.itemsize - 1)) * view.itemsize
    copy = copy_at(view, place)
    assert torch.equal(copy, view) and copy.dtype == view.dtype
    if count:
        assert copy.stride() == view.stride()
        assert alignment(copy) == address(copy) == place
        assert copy.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()


def test_memory_of_another_program_counts_as_a_boundary():
    """NumPy puts an array elsewhere in each process: ranks would seem to have different states."""
    memory = np.arange(66, dtype=np.float32)
    found = {alignment(torch.from_numpy(memory[start:])) for start in range(16)}
    assert found == {0}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(13, 17), nn.Linear(17, 5))
        self.register_buffer("covariance", torch.eye(4))


class KeepsGradients(torch.optim.Optimizer):
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["previous"] = parameter.grad


def built():
    torch.manual_seed(0)
    net = Net()
    optimizer = KeepsGradients(net.parameters(), {})
    return State(net=net, optimizer=optimizer, kept=Values(rows=torch.zeros(3), one=torch.zeros(1)))


def trained():
    """What a step leaves behind: views of larger vectors everywhere."""
    state = built()
    net, optimizer, kept = (state.objects[name] for name in ("net", "optimizer", "kept"))
    vector_to_parameters(parameters_to_vector(net.parameters()).detach() * 2, net.parameters())
    net.covariance = torch.randn(17)[1:].view(4, 4)
    gradients = torch.randn(400)
    for parameter in net.parameters():
        parameter.grad = gradients[7 : 7 + parameter.numel()].view_as(parameter)
    optimizer.step()
    kept.rows = torch.randn(9, 3)[5]  # Values keep a copy
    return state


def places(state):
    return {name: address(tensor) for name, tensor in state.flatten().tensors.items()}


def test_a_load_puts_every_tensor_where_it_was():
    """Parameters, a buffer, an optimizer's tensors; and a second load does what the first did."""
    before, after = trained(), built()
    expected = places(before)
    assert len(set(expected.values())) > 4  # the test sees something
    after.load(saved(before))
    assert places(after) == expected
    third = built()
    third.load(saved(after))
    assert places(third) == expected
