"""Samples that torch's default_collate cannot put together are refused with what can."""

from typing import Any

from torch.utils import data

from elastic.errors import UsageError


def default_collate(samples: list[Any]) -> Any:
    """Torch's. Raises UsageError for samples of several sizes, keys or unknown types."""
    try:
        return data.default_collate(samples)
    except (RuntimeError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"the samples of a batch cannot be put together ({type(error).__name__}: {error!s:.200}): expected numbers, arrays or tensors of "
            "one size, alike in every sample. Give collate=function(samples), which returns the batch, as in run.data(dataset, collate=padded) "
            "and run.evaluate(dataset, function, collate=padded): it pads them to one size, or returns a list"
        ) from error
