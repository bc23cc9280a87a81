"""A line of metrics is one step that counts; what the report computes with has the right type, or the line is left out."""

from dataclasses import dataclass, field
from typing import Any

from elastic.system.untrusted import fits

_CHECKED = {
    "step": int,
    "epoch": int,
    "world_size": int,
    "generation": int,
    "time": float,
    "seconds": float | None,
}
_OTHERS = ("loss", "chain")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """What rank 0 writes after a step.

    step: counted from 1; epoch: from 0. loss: a number, null where it was not finite. chain: see
    docs/architecture.md; two runs are equal as far as their chains are. time: seconds since 1970, when
    the step ended. seconds: how long it took. values: what the recipe logged, by name, any JSON.
    """

    step: int
    epoch: int = 0
    loss: Any = None
    chain: Any = None
    world_size: int = 0
    generation: int = 0
    time: float | None = None
    seconds: float | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        known = {name: getattr(self, name) for name in (*_CHECKED, *_OTHERS)}
        return self.values | {
            name: value for name, value in known.items() if value is not None or name == "loss"
        }


def parse(record: dict[str, Any]) -> StepLine | None:
    """None for what is no line of a step. A known name may be missing, but for `step`."""
    known = {name: record[name] for name in (*_CHECKED, *_OTHERS) if name in record}
    if "step" not in known or not all(
        fits(known[name], _CHECKED[name]) for name in known.keys() & _CHECKED.keys()
    ):
        return None
    return StepLine(**known, values={name: value for name, value in record.items() if name not in known})
