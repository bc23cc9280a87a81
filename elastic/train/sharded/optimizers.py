"""A sharded parameter needs an optimizer that updates each number by itself.

Others (LARS and LAMB by a norm, Muon by a matrix, Adafactor by means of rows) would update the rows
that a rank has by these alone. So a small parameter is updated twice, as a whole and by halves,
with the optimizer's own code and settings, and must become the same.
"""

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic.errors import UsageError
from elastic.snapshot.sharded import is_sharded

ROWS, COLUMNS, STEPS = 256, 130, 3  # more numbers than a block of an optimizer that quantizes
SCALES = 1.0, 1e3, 1e-3  # of gradients: one may clip by their norm
_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def check(optimizer: Optimizer) -> None:
    """Raises UsageError for one that has sharded parameters and is not by element."""
    drawn = torch.randn(STEPS + 1, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    halves = slice(ROWS // 2), slice(ROWS // 2, ROWS)
    for group in optimizer.param_groups:
        if not any(map(is_sharded, group["params"])):
            continue
        numbers = drawn.to(group["params"][0].device)
        try:
            by_halves = torch.cat([_updated(optimizer, group, numbers[:, rows]) for rows in halves])
            if torch.equal(_updated(optimizer, group, numbers), by_halves):
                continue
            reason = "an update of a matrix differed from that of its halves"
        except Exception as error:
            reason = f"a trial failed with {type(error).__name__}: {error}"
        raise UsageError(
            f"expected an optimizer that updates each number by itself, for sharded parameters, found {type(optimizer).__name__} ({reason}); take "
            "AdamW, SGD or another one by element, or leave out run.fully_shard"
        )


def _updated(optimizer: Optimizer, group: dict[str, Any], numbers: Tensor) -> Tensor:
    """A parameter after some updates by a copy of the optimizer, without its state.

    numbers: [1 + updates, ...], the parameter and its gradients.
    """
    parameter = nn.Parameter(numbers[0].clone())
    settings = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
    trial = object.__new__(type(optimizer))
    kept = {
        name: copy.copy(value) if isinstance(value, list | dict) else value
        for name, value in vars(optimizer).items()
    }
    kept |= {name: OrderedDict() for name in _HOOKS}
    vars(trial).update(kept, state=defaultdict(dict), param_groups=[settings | {"params": [parameter]}])
    for gradient, scale in zip(numbers[1:], SCALES, strict=True):
        parameter.grad = gradient * scale
        type(optimizer).step(trial)
    return parameter.detach()
