"""A drill flips one bit, and autograd does not notice.

Which tensor it is, and of which backward, is seen by tests/process/test_divergence.py.
"""

import pytest
import torch

from elastic.faults.flip import flip_bit


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
