"""The order in which data are trained, from the arguments of run.data that matter to a test."""

from typing import Any

from elastic.data.order import SampleOrder
from elastic.data.sampling import Sampling


def order_of(
    samples: int = 20, *, seed: int = 1, global_batch: int = 8, shards: int = 4, **arguments: Any
) -> SampleOrder:
    """Raises UsageError."""
    given = {"epochs": None, "steps": None, "tail": "drop", "weights": None, "order": None} | arguments
    return Sampling(**given).order_of(samples=samples, seed=seed, global_batch=global_batch, shards=shards)
