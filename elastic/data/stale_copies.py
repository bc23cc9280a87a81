"""A loop that sets numbers of its dataset is refused where loading processes have copies of it.

The processes copy the dataset when they begin, and load ahead: a strength or an epoch that the loop
sets later would have no effect in them, and a process that resumes would copy the new one. Each
step therefore compares the numbers and words among the attributes of the dataset, and of those that
it wraps, with what they were. It sees no change inside of other objects.
"""

from typing import Any

from elastic.data.contents import vars_of
from elastic.errors import UsageError

_PLAIN = bool, int, float, str, type(None)
_DEPTH = 4

Attributes = dict[str, bool | int | float | str | None]  # by name, such as `dataset.dataset.strength`


def attributes_of(dataset: Any) -> Attributes:
    found: Attributes = {}
    name = "dataset"
    for _ in range(_DEPTH):
        held = vars_of(dataset)
        found |= {f"{name}.{key}": value for key, value in held.items() if type(value) in _PLAIN}
        dataset, name = held.get("dataset"), f"{name}.dataset"
    return found


def changed(before: Attributes, now: Attributes) -> list[str]:
    """The names of what is not as it was."""
    return [name for name in before.keys() & now.keys() if repr(before[name]) != repr(now[name])]


def check(before: Attributes, now: Attributes, of_loading: set[str], step: int, workers: int) -> None:
    """Raises UsageError if the loop changed an attribute. of_loading: what loading changes."""
    for name in sorted(set(changed(before, now)) - of_loading):
        raise UsageError(
            f"step {step}: the loop changed {name}, which was {before[name]!r:.40} and is {now[name]!r:.40}, and the data-loading processes (workers={workers}) do not see it: "
            "they have copies of the dataset from the beginning of the loop. Use workers=0; or apply it to the batch, in the function given to step.mean_loss or step.sum, "
            "from step.number or batch.epoch; or choose the samples by run.data(order=...)"
        )
