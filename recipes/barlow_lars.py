"""LARS: each weight moves by a fixed share of its own norm, however large its gradient is.

It does not adapt groups with `adapt=False`: these (biases, norms) are plain momentum SGD.

Method: You et al., arXiv 1708.03888, in the variant of facebookresearch/barlowtwins: no clipping,
no epsilon, the learning rate stands outside the momentum, so a schedule acts on the whole of it at
once.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """For each parameter p, with gradient g:

    d = g + weight_decay * p
    d *= eta * |p| / |d|
    mu = momentum * mu + d
    p -= lr * mu
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        eta: float = 0.001,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eta": eta, "adapt": True}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                mu = state["mu"].mul_(group["momentum"]).add_(_direction(p, group))
                p.add_(mu, alpha=-group["lr"])


def _direction(p: Tensor, group: dict[str, Any]) -> Tensor:
    direction: Tensor = p.grad.add(p, alpha=group["weight_decay"])  # type: ignore[union-attr]
    if not group["adapt"]:
        return direction
    p_norm, norm = torch.linalg.vector_norm(p), torch.linalg.vector_norm(direction)
    # A choice on the device: a Python `if` would wait for the GPU once for each parameter.
    adaptable = (p_norm > 0) & (norm > 0)
    return direction * torch.where(adaptable, group["eta"] * p_norm / norm, 1.0)
