"""What a run is trained on is recorded beside its state, and compared at a resume and across ranks.

A data set of another length or other contents, other weights, another tail or another order would
make the next steps those of another run: they are refused. A run may become longer or shorter; that
is said. The record tells data sets apart by their length and by what they hold in memory
(fingerprint.py), and not by what they read from disk.
"""

import json
from dataclasses import dataclass, field
from typing import Annotated

from elastic.data.order import SampleOrder
from elastic.errors import UsageError
from elastic.system.untrusted import Count, Positive, decode, pattern

_Hash = Annotated[str, pattern("[0-9a-f]{0,16}", "up to 16 digits in hex")]

_ANY_LENGTH = "samples", "tail", "order"  # of a run that may become longer or shorter
_WHOLE = "samples", "epochs", "steps", "tail", "order"
_MAKE_ALIKE = (
    "make the same whole data set in every process and generation: give a split a generator of its own"
    " (torch.Generator().manual_seed(0)) and sort lists of files"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecord:
    """order: of weights, or of an order of the recipe's own in all epochs of the run; empty for
    permutations. contents: of each part of the dataset. recipe: of the recipe's text.
    """

    samples: Count
    epochs: Positive
    steps: Positive
    tail: Annotated[str, pattern("drop|pad", "drop or pad")]
    order: _Hash = ""
    contents: dict[str, _Hash] = field(default_factory=dict)
    recipe: _Hash = ""

    def to_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


def record_of(order: SampleOrder, contents: dict[str, str] | None = None, recipe: str = "") -> DataRecord:
    return DataRecord(
        samples=order.samples,
        epochs=order.epochs,
        steps=order.steps,
        tail=order.tail.value,
        order="" if order.draws is None else order.draws.sha256,
        contents=contents or {},
        recipe=recipe,
    )


def parse(text: str) -> DataRecord:
    """Raises ValueError."""
    return decode(DataRecord, text, what="the record of the data")


def check_resume(there: DataRecord, here: DataRecord, step: int, new_run: str) -> str:
    """What to say about a run that goes on after `step` with data in this order; empty for nothing.

    there: what stands beside the state of that step. At step 0 nothing was trained on any data.
    new_run: the command that begins one from that state. Raises UsageError, which names every
    difference, where the data are other ones.
    """
    if step == 0:
        return ""
    is_as_long = (there.steps, there.epochs) == (here.steps, here.epochs)
    # What an order of the recipe's own has chosen is compared as a whole: such a run keeps its
    # length.
    if found := _differences(there, here, _WHOLE if is_as_long else _ANY_LENGTH):
        raise UsageError(
            f"the state of step {step} was trained on other data than run.data has now: {found}; {_MAKE_ALIKE}; or begin a new run "
            f"from this state: {new_run}"
        )
    if is_as_long:
        return ""
    return (
        f"this run was to have {there.steps} steps ({there.epochs} epochs), and the recipe now asks for {here.steps} ({here.epochs}): "
        f"it has step {step} and ends after step {max(step, here.steps)}. From here on step.fraction and step.steps are those of the new length"
    )


def has_same_steps(there: DataRecord, now: DataRecord) -> bool:
    """Whether each step trains the same samples, as far as both records tell, in a run as long.

    Otherwise it was refused, or said, and a step may give another result.
    """
    return not _differences(there, now, _WHOLE)


def check_ranks(records: list[DataRecord]) -> None:
    """Raises UsageError, with the differences, unless all ranks have the same data."""
    for rank, record in enumerate(records):
        if found := _differences(records[0], record, _WHOLE):
            raise UsageError(
                f"expected the same data on every rank, found between the ranks 0 and {rank} other {found}; {_MAKE_ALIKE}: its shards"
                " are divided among the ranks already"
            )


def _differences(one: DataRecord, other: DataRecord, names: tuple[str, ...]) -> str:
    found = [
        f"{name} ({getattr(one, name) or 'none'} and {getattr(other, name) or 'none'})"
        for name in names
        if getattr(one, name) != getattr(other, name)
    ]
    there, here = one.contents, other.contents
    parts = [name for name in there | here if there.get(name) != here.get(name)]
    if parts:
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        found.append(f"contents of {', '.join(parts[:3])}{more}")
    return ", ".join(found)
