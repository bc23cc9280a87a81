"""What a run is trained on is recorded beside its state, and compared at a resume and across ranks.

A data set of another length, other weights, another tail or another order would make the next steps
those of another run: they are refused. A run may become longer or shorter; that is said. The record
tells data sets apart by their length alone, and not by what their samples hold.
"""

import json
from dataclasses import dataclass
from typing import Annotated

from elastic.data.order import SampleOrder
from elastic.errors import UsageError
from elastic.system.untrusted import Count, Positive, decode, pattern

_Hash = Annotated[str, pattern("[0-9a-f]{0,16}", "up to 16 digits in hex")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecord:
    """weights: what is drawn by, empty for permutations. order: of the recipe's own, all epochs of
    the run; order_so_far: of those up to the epoch of the state that the record stands beside.
    """

    samples: Count
    epochs: Positive
    steps: Positive
    tail: Annotated[str, pattern("drop|pad", "drop or pad")]
    weights: _Hash = ""
    order: _Hash = ""
    order_so_far: _Hash = ""

    def to_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


def record_of(order: SampleOrder, epoch: int) -> DataRecord:
    """The record beside a state of this epoch, from 0; it may lie behind the run's end."""
    draws = order.draws
    hashes = () if draws is None else draws.order_sha256
    return DataRecord(
        samples=order.samples,
        epochs=order.epochs,
        steps=order.steps,
        tail=order.tail.value,
        weights="" if draws is None else draws.weights_sha256,
        order=hashes[-1] if hashes else "",
        order_so_far=hashes[min(epoch, len(hashes) - 1)] if hashes else "",
    )


def parse(text: str) -> DataRecord:
    """Raises ValueError."""
    return decode(DataRecord, text, what="the record of the data", exact=False)


def check_resume(there: DataRecord, order: SampleOrder, step: int) -> str:
    """What to say about a run that goes on after `step` with data in this order; empty for nothing.

    there: what stands beside the state of that step. At step 0 nothing was trained on any data.
    Raises UsageError, which names every difference, where the data are other ones.
    """
    if step == 0:
        return ""
    here = record_of(order, order.position(step)[0])
    differences = [
        f"{words} {_text(name, getattr(there, name))} there, {_text(name, getattr(here, name))} here"
        for name, words in {"samples": "samples:", "tail": "tail:", "weights": "weights:"}.items()
        if getattr(there, name) != getattr(here, name)
    ]
    # A longer or shorter run has other epochs in all, but must have had the same ones so far.
    is_as_long = (there.steps, there.epochs) == (here.steps, here.epochs)
    name = "order" if is_as_long else "order_so_far"
    if not differences and step <= here.steps and getattr(there, name) != getattr(here, name):
        differences = [f"order: {_text(name, there.order)} there, {_text(name, here.order)} here"]
    if differences:
        raise UsageError(
            f"the state of step {step} was trained on other data than run.data has now ({'; '.join(differences)}); put the former "
            "data back to resume, or begin a new run from this state: elastic-train RECIPE --from RUN --run-dir NEW"
        )
    if is_as_long:
        return ""
    ends = "it goes on to" if here.steps > there.steps else "it ends after"
    ends = f"it has step {step} already and ends there, not after" if step >= here.steps else ends
    return (
        f"this run was to have {there.steps} steps ({there.epochs} epochs), and the recipe now asks for {here.steps} ({here.epochs}): "
        f"{ends} step {here.steps}. From here on step.fraction and step.steps are those of the new length"
    )


def check_ranks(records: list[DataRecord]) -> None:
    """Raises UsageError, with the first difference, unless all ranks have the same data."""
    for rank, record in enumerate(records):
        if record != records[0]:
            name = next(
                each for each in DataRecord.__slots__ if getattr(record, each) != getattr(records[0], each)
            )
            raise UsageError(
                f"expected the same data on every rank, found {name.replace('_so_far', '')} "
                f"{_text(name, getattr(records[0], name))} on rank 0 and {_text(name, getattr(record, name))} on rank {rank}; "
                "give each rank the whole data set (its shards are divided among the ranks already), with weights and "
                "an order that do not depend on the rank"
            )


def _text(name: str, value: object) -> str:
    if name in ("weights", "order", "order_so_far"):
        return f"another one ({value})" if value else "none"
    return str(value)
