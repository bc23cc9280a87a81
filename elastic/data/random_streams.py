"""Each random draw comes from a keyed stream: it depends on its purpose, not on earlier draws.

Entering a stream seeds torch (the CPU and, if CUDA is initialised, the current GPU), Python's
`random` and NumPy's global generator. It does not reach generators that a recipe makes for itself:
those need a key of their own.

Two purposes may have the same numbers: torch's CPU generator and NumPy's take 32 bits of a stream's
64 (torch.manual_seed(5) and torch.manual_seed(5 + 2**32) are one stream). Among 100 000 streams, of
say 12 500 steps of 8 shards, one such pair is to be expected, with the same dropout masks. That is
harmless as long as few streams coincide, and the result remains a function of the seed. More bits
would be other numbers than in runs that have begun. Python's generator takes all bits, CUDA's 63.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from elastic.data.random_keys import key

# random.seed is a call of Python that tells integers from texts before it does the same.
_PYTHON: Any = random.seed.__self__  # type: ignore[attr-defined]
_seed_python = super(random.Random, _PYTHON).seed


def enter(seed: int, *purpose: int | str) -> None:
    """Seed all global generators for a purpose, such as (seed, "shard", step, shard)."""
    seed_all(key(seed, *purpose))


def seed_all(stream: int) -> None:
    """Seed all global generators by a key."""
    # Not torch.manual_seed: before CUDA is initialised each call of it queues another call, with a
    # stack trace, and the queue would grow with every sample.
    torch.default_generator.manual_seed(stream >> 1)  # the 63 bits of a non-negative int64
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(stream >> 1)
    _seed_python(stream)
    _PYTHON.gauss_next = None
    np.random.seed(stream & 0xFFFFFFFF)  # noqa: NPY002 - the global generator is what old augmentation code draws from


@contextmanager
def kept() -> Iterator[None]:
    """All global generators go on afterwards as if nothing had been drawn meanwhile."""
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    of_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        if of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu)
