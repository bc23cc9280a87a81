"""The recipe's mathematics beside plain restatements: loss, gradient by shards, LARS, learning
rates.
"""

import barlow
import pytest
import torch
from barlow_lars import LARS
from torch import Tensor, nn

LAMBD = 0.005


def plain_loss(a: Tensor, b: Tensor) -> Tensor:
    """The paper's formula on all samples at once: batch norm without affine, correlation, two sums;
    over D.
    """
    norm = nn.BatchNorm1d(a.shape[1], affine=False).double()
    c = norm(a.double()).T @ norm(b.double()) / len(a)
    on = sum((c[i, i] - 1) ** 2 for i in range(len(c)))
    off = sum(c[i, j] ** 2 for i in range(len(c)) for j in range(len(c)) if i != j)
    total: Tensor = (on + LAMBD * off) / len(c)
    return total


def network(widths: str = "12-6") -> barlow.BarlowTwins:
    settings = barlow.Settings.parse(["--projector", widths])
    return barlow.build_model(settings, channels=1, small_images=True)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_loss_equals_the_formula_of_the_paper() -> None:
    """Embeddings far from zero mean: a variance computed as a difference of float32 sums would be
    visibly wrong here.
    """
    torch.manual_seed(0)
    a, b = torch.randn(64, 5) + 300, torch.randn(64, 5) - 300
    sums = barlow.correlation_sums(a, b)
    found = barlow.barlow_loss(sums, count=64, dim=5, lambd=LAMBD)
    torch.testing.assert_close(found.loss, plain_loss(a, b), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.loss, found.on_diag + LAMBD * found.off_diag)


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_gradient_by_shards_is_the_gradient_of_the_whole_batch(shards: int) -> None:
    """Done as the trainer does it: sums of each shard, dL/dsums into each shard, gradients added; W
    never appears.
    """
    torch.manual_seed(0)
    one, other = torch.rand(24, 1, 8, 8), torch.rand(24, 1, 8, 8)
    whole, parts = network(), network()
    expected = plain_loss(whole(one), whole(other))
    torch.autograd.backward(expected)

    outputs = [
        barlow.correlation_sums(parts(x), parts(y))
        for x, y in zip(one.chunk(shards), other.chunk(shards), strict=True)
    ]
    total = torch.stack(outputs).sum(0).detach().requires_grad_()
    loss = barlow.barlow_loss(total, count=24, dim=6, lambd=LAMBD).loss
    torch.autograd.backward(loss)
    torch.autograd.backward(outputs, [total.grad] * shards)

    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    difference = (gradients(parts) - gradients(whole)).norm() / gradients(whole).norm()
    assert difference < 1e-4


def restated_lars(p: Tensor, grads: list[Tensor], *, lr: float, decay: float, adapt: bool) -> Tensor:
    mu = torch.zeros_like(p)
    for grad in grads:
        d = grad + decay * p
        if adapt and float(p.norm()) > 0 and float(d.norm()) > 0:
            d = d * (0.001 * p.norm() / d.norm())
        mu = 0.9 * mu + d
        p = p - lr * mu
    return p


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_lars_moves_as_its_restatement(adapt: bool, start: float) -> None:
    """Several steps, because of the momentum; also from zero, where the trust ratio must be 1."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(3, 4) * start)
    grads = [torch.randn(3, 4) for _ in range(4)] + [torch.zeros(3, 4)]
    expected = restated_lars(p.detach().clone(), grads, lr=0.3, decay=0.01, adapt=adapt)
    optimizer = LARS([{"params": [p], "weight_decay": 0.01, "adapt": adapt}], lr=0.3)
    for grad in grads:
        p.grad = grad
        optimizer.step()
    torch.testing.assert_close(p.detach(), expected)


def test_set_learning_rates_scales_lars_with_the_batch() -> None:
    settings = barlow.Settings.parse(["--optimizer", "lars", "--global-batch", "512", "--warmup", "0"])
    optimizer = barlow.build_optimizer(network(), settings)
    assert barlow.set_learning_rates(optimizer, 0.0, settings) == pytest.approx((0.4, 2.4))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 2.4])
