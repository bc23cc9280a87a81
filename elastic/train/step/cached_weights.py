"""Casts of weights that torch keeps for a block of code are made again for each call of a shard.

`torch.autocast` and `parametrize.cached` keep casts and parametrized weights until their block
ends. Around the loop that would be its end: each step would compute with the weights of the first
one, and a process that restarts with those of the step where it goes on. Where one shard uses a
weight without gradients, the next one would find it without a graph.

So they are dropped at the beginning of a step, before and after each call of a function of the
recipe's, and after each update by an optimizer of torch.
"""

import torch
from torch.nn.utils import parametrize


def drop() -> None:
    """It takes a fraction of a microsecond where nothing is cached."""
    torch.clear_autocast_cache()
    if parametrize._cache:  # noqa: SLF001 - it has no function for it
        parametrize._cache.clear()  # noqa: SLF001
