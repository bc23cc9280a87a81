"""How often something is done, or how long it may take, as an option says it.

Nothing here reads a clock.
"""

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, get_args

from elastic.errors import UsageError

Kind = Literal["steps", "seconds", "auto", "off"]

_SECONDS_PER_UNIT = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}


def duration_s(text: str) -> float | None:
    """Seconds of `30`, `30s`, `0.5min` or `2h`, to a thousandth; None for anything else."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)(s|min|h|)", text, re.ASCII)
    # 0.009 * 60 is 0.5399999999999999.
    return None if match is None else round(float(match[1]) * _SECONDS_PER_UNIT[match[2]], 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """An interval of `value` steps or seconds, one the program chooses (auto), or none (off)."""

    kind: Kind
    value: float = 0.0  # 0 for auto and off

    def next_step(self, step: int) -> int:
        """The first step from this one on whose number `value` divides."""
        return -(-step // int(self.value)) * int(self.value)

    @staticmethod
    def parse(
        text: str,
        *,
        kinds: Container[Kind] = get_args(Kind),
        unit: str = "",
        expected: str = "500steps, 30s, 10min, 2h, auto or off",
    ) -> "Every":
        """Read `500steps`, `30s`, `10min`, `2h`, `auto` or `off`; a number alone is of this `unit`.

        Raises UsageError, which says what was `expected`, for other text and other `kinds`.
        """
        every = _read(text + unit if text[-1:].isdigit() else text)
        if every is None or every.kind not in kinds:
            raise UsageError(f"expected {expected}, found {text!r}")
        return every


def _read(text: str) -> Every | None:
    if text == "auto":
        return Every(kind="auto")
    if text == "off":
        return Every(kind="off")
    if match := re.fullmatch(r"([1-9]\d{0,11})steps?", text, re.ASCII):
        return Every(kind="steps", value=float(match[1]))
    # A number alone could mean steps or seconds.
    seconds = None if text[-1:].isdigit() else duration_s(text)
    return Every(kind="seconds", value=seconds) if seconds else None
