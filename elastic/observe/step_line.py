"""A line of metrics is one step that counts; with a field of the wrong type it is no line at all.

It does not promise that the values are true.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from elastic.system.untrusted import bounds, fits

CHAIN_DIGITS = 16  # of a chain value, in a line
WHOLE_BOUND = 2**62  # arrays hold what is between this and its negative
_Whole = Annotated[int, bounds(lowest=1 - WHOLE_BOUND, below=WHOLE_BOUND)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """What rank 0 writes after a step.

    step: counted from 1; epoch: from 0. loss: what the recipe logged under this name, else what
    `mean_loss` gave; null where it was not finite or the recipe has none (loss_words.py shows both
    as "none"). chain: see docs/architecture.md; two runs are equal as far as their chains are.
    time: seconds since 1970, when the step ended. seconds: how long it took, without saves and
    calls of `run.evaluate`. audited: true if the step was (`--audit`). slowest_rank: whose own work
    took longest. slowest_s: how long; others_s: the median of the other ranks' own work, in
    seconds, without their waits for each other, and as if each had at least as many shards. None
    with one rank. values: what the recipe logged, by name, any JSON. Any marks what is printed and
    compared, not computed with.
    """

    step: _Whole
    epoch: _Whole = 0
    loss: Any = None
    chain: Any = None
    world_size: _Whole = 0
    generation: _Whole = 0
    time: float | None = None
    seconds: float | None = None
    audited: bool | None = None
    slowest_rank: _Whole | None = None
    slowest_s: float | None = None
    others_s: float | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        known = {name: getattr(self, name) for name in _KINDS}
        return self.values | {
            name: value for name, value in known.items() if value is not None or name == "loss"
        }


# In the order in which a line is written.
_KINDS: dict[str, Any] = {each.name: each.type for each in fields(StepLine) if each.name != "values"}
OWN_NAMES = frozenset(_KINDS) - {"loss"}  # that the run itself sets


def parse(record: dict[str, Any]) -> StepLine:
    """Raises ValueError for what is no line of a step; each name but `step` may be missing."""
    known = {name: record[name] for name in _KINDS if name in record}
    if "step" not in known or not all(
        kind is Any or fits(known[name], kind) for name, kind in _KINDS.items() if name in known
    ):
        raise ValueError("expected the line of a step")
    return StepLine(**known, values={name: value for name, value in record.items() if name not in known})
