"""A line of metrics is one step that counts; with a field of the wrong type it is no line at all.

It does not promise that the values are true.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import msgspec

from elastic.system.untrusted import LARGEST

DIGITS = 6  # of a loss, where a person reads it
CHAIN_DIGITS = 16  # of a chain value, in a line
# Arrays hold these, and sums of these are numbers; msgspec refuses others.
_Whole = Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)]
_Number = Annotated[float, msgspec.Meta(gt=-float(LARGEST), lt=float(LARGEST))]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """What rank 0 writes after a step.

    step: counted from 1; epoch: from 0. loss: what the recipe logged under this name, else what
    `mean_loss` gave; null where it was not finite or the recipe has none (`loss_words` shows both
    as "none"). chain: see docs/architecture.md; two runs are equal as far as their chains are.
    time: seconds since 1970, when the step ended. seconds: how long it took, without saves and
    calls of `run.evaluate`. audited: true if the step was (`--audit`). slowest_rank: whose own work
    took longest. slowest_s: how long; others_s: the median of the other ranks' own work, in
    seconds, without their waits for each other, and as if each had at least as many shards. None
    with one rank. values: what the recipe logged, by name, any JSON. Any marks values that are
    printed and compared, not computed with.
    """

    step: _Whole
    epoch: _Whole = 0
    loss: Any = None
    chain: Any = None
    world_size: _Whole = 0
    generation: _Whole = 0
    time: _Number | None = None
    seconds: _Number | None = None
    audited: bool | None = None
    slowest_rank: _Whole | None = None
    slowest_s: _Number | None = None
    others_s: _Number | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        record = self.values | {"step": self.step, "epoch": self.epoch, "loss": self.loss}
        for name in _AFTER_LOSS:
            if (value := getattr(self, name)) is not None:
                record[name] = value
        return record


# In the order in which they are written.
NAMES = tuple(each.name for each in fields(StepLine) if each.name != "values")
_AFTER_LOSS = NAMES[NAMES.index("loss") + 1 :]
OWN_NAMES = frozenset(NAMES) - {"loss"}  # that the run itself sets


def parse(record: dict[str, Any]) -> StepLine:
    """Raises ValueError for anything but a step's line; each name but `step` may be missing."""
    known = {name: record[name] for name in NAMES if name in record}
    try:
        line = msgspec.convert(known, StepLine)
    except (msgspec.ValidationError, UnicodeError, RecursionError) as error:
        raise ValueError(f"expected the line of a step, found: {error}") from error
    line.values.update((name, value) for name, value in record.items() if name not in known)
    return line


def loss_words(loss: object, digits: int = DIGITS) -> str:
    """A loss as a person reads it, wherever a run is shown. loss: of a line, so any JSON; anything
    but a finite number is "none".
    """
    value = math.nan if isinstance(loss, bool) else number(loss)
    return f"{value:.{digits}g}" if math.isfinite(value) else "none"


def number(value: Any) -> float:
    """NaN for anything but a number that a float can hold; True counts as 1."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
