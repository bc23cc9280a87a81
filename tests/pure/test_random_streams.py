"""Draws depend on what they are for, and on nothing that happened before."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.data import random_streams

SOURCES = {
    "torch": lambda: torch.rand(4).tolist(),
    "random": lambda: [random.random() for _ in range(4)],
    "numpy": lambda: np.random.rand(4).tolist(),  # noqa: NPY002 - the global generator is the point
}


def draws(*purpose):
    random_streams.enter(*purpose)
    return {name: draw() for name, draw in SOURCES.items()}


@given(st.integers(0, 2**64 - 1), st.integers(0, 100), st.integers(0, 1000))
def test_a_purpose_has_the_same_draws_whatever_was_drawn_before(seed, step, unrelated):
    """Another stream is entered and used up to some point in between."""
    first = draws(seed, "shard", step)
    draws(unrelated, "noise")
    assert draws(seed, "shard", step) == first


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "other",
    [(2, "shard", 3, 4), (1, "sample", 3, 4), (1, "shard", 4, 3), (1, "shard", 3), (1, "shard", 3, 4, 0)],
)
def test_every_part_of_the_purpose_counts(source, other):
    """Seed, word, numbers, their order and their count: a part that is lost would give two purposes
    the same draws.
    """
    assert draws(1, "shard", 3, 4)[source] != draws(*other)[source]
