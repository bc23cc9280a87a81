"""Each random draw comes from a keyed stream: it depends on its purpose, not on earlier draws.

Entering a stream seeds torch (the CPU and, if CUDA is initialised, the current GPU), Python's
`random` and NumPy's global generator. It does not reach generators that a recipe makes for itself:
those need a key of their own.
"""

import random

import numpy as np
import torch

from elastic.data.random_keys import key


def enter(seed: int, *purpose: int | str) -> None:
    """Seed all global generators for a purpose, such as (seed, "shard", step, shard)."""
    stream = key(seed, *purpose)
    # Not torch.manual_seed: before CUDA is initialised each call of it queues another call, with a
    # stack trace, and the queue would grow with every sample.
    torch.default_generator.manual_seed(stream >> 1)  # the 63 bits of a non-negative int64
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(stream >> 1)
    random.seed(stream)
    np.random.seed(stream & 0xFFFFFFFF)  # noqa: NPY002 - the global generator is what old augmentation code draws from
