"""A loss has the same words wherever a run is shown: its digits, or "none".

A line of metrics has null for a loss that was not finite and for one that a recipe does not have;
from the newest line alone the two cannot be told apart.
"""

import math
from contextlib import suppress
from decimal import Decimal

DIGITS = 6


def loss_words(loss: object, digits: int = DIGITS) -> str:
    """loss: of a line, so any JSON; what is no finite number is "none"."""
    if isinstance(loss, bool) or not isinstance(loss, int | float):
        return "none"
    with suppress(OverflowError):
        return f"{loss:.{digits}g}" if math.isfinite(loss) else "none"
    # A whole number beyond the largest float.
    mantissa, _, exponent = f"{Decimal(loss):.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{exponent}"
