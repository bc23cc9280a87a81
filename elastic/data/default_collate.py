"""Samples that torch's default_collate cannot put together are refused with what can.

A RuntimeError may also be the machine's: in a data-loading process, torch writes the batch into
shared memory, which may be full. So only those are refused whose words are about the samples.
"""

import re
from typing import Any

from torch.utils import data

from elastic.errors import UsageError

# Of torch 2.15, in this process and in a data-loading one, which cannot enlarge a batch.
_OF_SAMPLES = re.compile(
    r"equal size|resize storage that is not resizable|by the default collate_fn|support automatic differentiation"
)


def default_collate(samples: list[Any]) -> Any:
    """Torch's. Raises UsageError for samples of several sizes, keys or unknown types."""
    try:
        return data.default_collate(samples)
    except (RuntimeError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, RuntimeError) and _OF_SAMPLES.search(str(error)) is None:
            raise
        raise UsageError(
            f"the samples of a batch cannot be put together ({type(error).__name__}: {error!s:.200}): expected numbers, arrays or tensors of "
            "one size, alike in every sample. Give collate=function(samples), which returns the batch, as in run.data(dataset, collate=padded) "
            "and run.evaluate(dataset, function, collate=padded): it pads them to one size, or returns a list"
        ) from error
