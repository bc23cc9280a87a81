"""A sharded parameter needs an optimizer that updates each number by itself.

Others (LARS and LAMB by a norm, Muon by a matrix, Adafactor by means of rows) would update the rows
that a rank has by these alone. So a small parameter is updated twice, as a whole and by halves,
with the optimizer's own code and settings, and must become the same.

Kernels of a CPU take most numbers as vectors and the last ones singly, and some (of fused Adam, or
of 16 bits) round these otherwise. So each row of a parameter of short rows, all of whose numbers
are last ones, must become what it does in the whole.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic.errors import UsageError
from elastic.snapshot.sharded import is_sharded

ROWS, COLUMNS, STEPS = 256, 130, 3  # more numbers than a block of an optimizer that quantizes
SHORT_ROWS, SHORT = 128, 7  # numbers: fewer than a vector has
START = 1e-3  # of parameters: an update is of their size, or its last bits are lost in the addition
SCALES = 1.0, 1e3, 1e-3  # of gradients: one may clip by their norm
_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def check(optimizer: Optimizer) -> None:
    """Raises UsageError for one that has sharded parameters and is not by element."""
    drawn = torch.randn(STEPS + 1, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    tried = set[str]()
    kinds = [
        (group, like)
        for group in optimizer.param_groups
        for like in {p.dtype: p for p in group["params"] if is_sharded(p)}.values()
    ]
    for group, like in kinds:
        numbers = drawn.to(like)
        short = numbers[:, :SHORT_ROWS, :SHORT]
        # Numbers that are set do not choose a kernel, and this trial takes longer.
        flags = {name: each for name, each in group.items() if not isinstance(each, float | list)}
        kind = f"{numbers.dtype} {numbers.device} {flags}"
        try:
            halves = [_updated(optimizer, group, [half]) for half in numbers.chunk(2, 1)]
            is_alike = torch.equal(_updated(optimizer, group, [numbers]), torch.cat(halves))
            if is_alike and kind not in tried:
                rows = _updated(optimizer, group, torch.split(short, 1, 1))
                is_alike = torch.equal(_updated(optimizer, group, [short]), rows)
            tried.add(kind)
            if is_alike:
                continue
            reason = "an update of a matrix differed from that of its rows"
        except Exception as error:
            reason = f"a trial failed with {type(error).__name__}: {error}"
        raise UsageError(
            f"expected an optimizer that updates each number by itself, for sharded parameters, found {type(optimizer).__name__} ({reason}); take "
            "AdamW, SGD or another one by element, on CPUs in 32 bits, unfused, or leave out run.fully_shard"
        )


def _updated(optimizer: Optimizer, group: dict[str, Any], pieces: Sequence[Tensor]) -> Tensor:
    """Parameters after some updates by a copy of the optimizer, without its state, in one.

    pieces: [1 + updates, ...] of each, the parameter and its gradients.
    """
    parameters = [nn.Parameter(each[0] * START) for each in pieces]
    settings = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
    trial = object.__new__(type(optimizer))
    kept = {
        name: copy.copy(value) if isinstance(value, list | dict) else value
        for name, value in vars(optimizer).items()
    }
    kept |= {name: OrderedDict() for name in _HOOKS}
    vars(trial).update(kept, state=defaultdict(dict), param_groups=[settings | {"params": parameters}])
    for number, scale in enumerate(SCALES, start=1):
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece[number] * scale
        type(optimizer).step(trial)
    return torch.cat([each.detach() for each in parameters])
