"""A sum of whole numbers is exact in 64 bits, or refused before it is made.

Integers wrap where a sum leaves their range, and no word is said. What each part of a sum may hold
at most follows from the number of parts alone: a sum of numbers that small fits, whatever they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from elastic.errors import UsageError

MOST = torch.iinfo(torch.int64).max


def widened(value: Tensor, call: str, place: str) -> Tensor:
    """int64, of whole numbers of any type. call, place: what an error names.

    Raises UsageError for numbers that int64 does not hold.
    """
    wide = value.detach().to(torch.int64)
    if value.dtype is torch.uint64 and bool((wide < 0).any()):
        raise UsageError(f"{call}: expected whole numbers up to 2**63 - 1, found larger ones{place}")
    return wide


@dataclass(slots=True)
class Extremes:
    """The smallest and the largest number at each place of the parts of a sum.

    They stay on the parts' device until `check`, so that a GPU is not waited for at each part.
    """

    _low: list[Tensor] = field(default_factory=list)
    _high: list[Tensor] = field(default_factory=list)

    def add(self, part: Tensor) -> None:
        """part: int64, of one shape for all parts."""
        self._low = [torch.minimum(low, part) for low in self._low] or [part.clone()]
        self._high = [torch.maximum(high, part) for high in self._high] or [part.clone()]

    def check(self, num_parts: int, call: str, places: Iterable[tuple[str, int]]) -> None:
        """Raises UsageError where the sum of so many parts could leave the range of int64.

        places: of the numbers in a part, in order: what an error names, and how many.
        """
        limit = MOST // num_parts
        for low, high in zip(self._low, self._high, strict=True):
            beyond = torch.nonzero((low.reshape(-1) < -limit) | (high.reshape(-1) > limit)).reshape(-1)
            if len(beyond):
                first = int(beyond[0])
                lowest, highest = int(low.reshape(-1)[first]), int(high.reshape(-1)[first])
                raise too_large(call, highest if highest > limit else lowest, limit, _place(first, places))


def too_large(call: str, value: int, limit: int, place: str) -> UsageError:
    return UsageError(
        f"{call}: whole numbers are added exactly, in 64 bits: expected at most {limit} in each part, so that the sum of all parts fits, "
        f"found {value if abs(value) < 2**80 else 'a far larger number'}{place}; return it as a float, or as two numbers, "
        "x // 2**32 and x % 2**32"
    )


def _place(index: int, places: Iterable[tuple[str, int]]) -> str:
    for name, count in places:
        if index < count:
            return f" in {name}" if name else ""
        index -= count
    return ""
