"""What tells whether a parameter was written to, or got other memory, for all of them at once."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class ParameterMarks(NamedTuple):
    """versions: autograd's counts of changes. addresses: in memory. Both by parameter."""

    versions: list[int]
    addresses: list[int]


def marks_of(parameters: Sequence[Tensor]) -> ParameterMarks:
    """Writes through `.data` leave no mark."""
    versions = [parameter._version for parameter in parameters]  # noqa: SLF001 - no public name
    return ParameterMarks(versions, list(map(Tensor.data_ptr, parameters)))
