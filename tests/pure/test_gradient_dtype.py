"""A gradient of another dtype than its parameter is refused by name, whichever shard gives it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import ALONE, FEATURES, steps
from torch import nn

from elastic.errors import UsageError
from elastic.train.state.state import State

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="before torch 2.11 a gradient has its parameter's dtype"
)
SHARDS = 4
OWN, WIDE = torch.bfloat16, torch.float32
REFUSAL = r"expected gradients of net\.weight in its own dtype, torch\.bfloat16, found {}"


class Multiplied(torch.autograd.Function):
    """The product with a narrow weight, whose gradient has a dtype that the caller chooses."""

    @staticmethod
    def forward(ctx, x, weight, dtype):
        ctx.save_for_backward(x)
        ctx.dtype = dtype
        return x @ weight.float().T

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return None, (gradient.T @ x).to(ctx.dtype), None


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, FEATURES, dtype=OWN))
        self.other = nn.Linear(FEATURES, 3)


def loss_of(net, kinds):
    """kinds: by shard, the dtype of the weight's gradient; None where the shard gives it none."""

    def loss(batch):
        dtype, x = kinds[batch.shard], batch.data[0]
        output = net.other(x) if dtype is None else net.other(x) + Multiplied.apply(x, net.weight, dtype)
        return output.square().mean()

    return loss


def state_of(net, *, is_late):
    """is_late: no optimizer has the weight, and no backward has reached it yet."""
    parameters = net.other.parameters() if is_late else net.parameters()
    return State(net=net, optimizer=torch.optim.SGD(parameters, lr=0.1))


KINDS = st.lists(st.sampled_from([None, OWN, WIDE]), min_size=SHARDS, max_size=SHARDS)


@settings(max_examples=40, deadline=None)
@given(kinds=KINDS, is_late=st.booleans())
def test_no_gradient_of_another_dtype_is_added_unseen(kinds, is_late):
    """Autograd adds the second shard of a pair in place, so that its dtype is never seen."""
    net = Narrow()
    net.weight.grad_dtype = None  # any
    step = next(steps(ALONE, state_of(net, is_late=is_late), shards=SHARDS))
    if WIDE in kinds or not is_late:
        found = r"(torch\.float32|net\.weight\.grad_dtype = None)"
        with pytest.raises(UsageError, match=REFUSAL.format(found)):
            step.mean_loss(loss_of(net, kinds))
    else:
        step.mean_loss(loss_of(net, kinds))
        assert net.weight.grad is None or net.weight.grad.dtype is OWN
