"""What a run is trained on is recorded beside its state, and compared at a resume and across ranks.

A data set of another length or other contents, other weights, another tail or another order would
make the next steps those of another run: they are refused. A run may become longer or shorter; that
is said. The record tells data sets apart by their length and by what they hold in memory
(contents.py), and not by what they read from disk.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from elastic.data import permutation
from elastic.data.order import SampleOrder, Shuffle
from elastic.errors import UsageError
from elastic.system.untrusted import Count, Positive, decode, pattern

_Hash = Annotated[str, pattern("[0-9a-f]{0,16}", "up to 16 digits in hex")]

_MAKE_ALIKE = (
    "The script must make the same data in every process and in every generation: give a split a generator of its own"
    " (random_split(..., generator=torch.Generator().manual_seed(0))), sort lists of files, and draw nothing on a condition that a"
    " later generation may not meet, such as a missing file"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecord:
    """weights: what is drawn by, empty for permutations. order: of the recipe's own, all epochs of
    the run; order_so_far: of those up to the epoch of the state that the record stands beside; both
    are of the permutation's network where there is one, and empty where samples are sorted.
    contents: of each part of the dataset; None in records of earlier versions. generators: the
    states of the global generators of random numbers when the loop began, on rank 0. recipe: of the
    recipe's text; empty in earlier records. Other fields that records of earlier versions have are
    ignored.
    """

    samples: Count
    epochs: Positive
    steps: Positive
    tail: Annotated[str, pattern("drop|pad", "drop or pad")]
    weights: _Hash = ""
    order: _Hash = ""
    order_so_far: _Hash = ""
    contents: dict[str, _Hash] | None = None
    generators: dict[str, _Hash] = field(default_factory=dict)
    recipe: _Hash = ""

    def to_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


def record_of(
    order: SampleOrder,
    epoch: int,
    contents: dict[str, str] | None = None,
    generators: Mapping[str, str] | None = None,
    recipe: str = "",
) -> DataRecord:
    """The record beside a state of this epoch, from 0; it may lie behind the run's end."""
    draws = order.draws
    hashes = () if draws is None else draws.order_sha256
    if draws is None and order.shuffle is Shuffle.NETWORK:
        hashes = (permutation.sha256(),)
    return DataRecord(
        samples=order.samples,
        epochs=order.epochs,
        steps=order.steps,
        tail=order.tail.value,
        weights="" if draws is None else draws.weights_sha256,
        order=hashes[-1] if hashes else "",
        order_so_far=hashes[min(epoch, len(hashes) - 1)] if hashes else "",
        contents=contents,
        generators=dict(generators or {}),
        recipe=recipe,
    )


def parse(text: str) -> DataRecord:
    """Raises ValueError."""
    return decode(DataRecord, text, what="the record of the data", exact=False)


def check_resume(there: DataRecord, now: DataRecord, order: SampleOrder, step: int, new_run: str) -> str:
    """What to say about a run that goes on after `step` with data in this order; empty for nothing.

    there: what stands beside the state of that step. now: that of epoch 0. At step 0 nothing was
    trained on any data. new_run: the command that begins one from that state. Raises UsageError,
    which names every difference, where the data are other ones.
    """
    if step == 0:
        return ""
    here = record_of(order, order.position(step)[0], now.contents, now.generators)
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
    parts = _other_parts(there.contents, here.contents)
    if parts:
        differences.append(f"the contents of {_listed(parts)}")
    if differences:
        raise UsageError(
            f"the state of step {step} was trained on other data than run.data has now ({'; '.join(differences)}); put the former "
            f"data back to resume, or begin a new run from this state: {new_run}"
            f"{'. ' + _MAKE_ALIKE if parts else ''}"
        )
    said = [_other_draws(there, here), "" if is_as_long else _other_length(there, here, step)]
    return "\n".join(filter(None, said))


def _other_length(there: DataRecord, here: DataRecord, step: int) -> str:
    ends = "it goes on to" if here.steps > there.steps else "it ends after"
    ends = f"it has step {step} already and ends there, not after" if step >= here.steps else ends
    return (
        f"this run was to have {there.steps} steps ({there.epochs} epochs), and the recipe now asks for {here.steps} ({here.epochs}): "
        f"{ends} step {here.steps}. From here on step.fraction and step.steps are those of the new length"
    )


def check_beginning(there: DataRecord, now: DataRecord) -> str:
    """What to say where a run begins at step 0 again, and kept nothing; empty for nothing.

    there: what it began with before.
    """
    names = ("samples", "tail", "weights", "order_so_far")  # a longer run has another order in all
    others = [name.removesuffix("_so_far") for name in names if getattr(there, name) != getattr(now, name)]
    found = [f"its {name}" for name in others] + _other_parts(there.contents, now.contents)
    if not found:
        return _other_draws(there, now)
    return (
        f"no state of this run is left, and it now begins on other data than at first ({_listed(found)}): its result is not the one that"
        f" it would have had. If that was not meant, stop it. {_MAKE_ALIKE}"
    )


def has_same_steps(there: DataRecord, now: DataRecord) -> bool:
    """Whether each step trains the same samples, as far as both records tell, in a run as long.

    Otherwise it was refused, or said, and a step may give another result. now: that of epoch 0.
    """
    names = "samples", "epochs", "steps", "tail", "weights", "order"
    is_same = all(getattr(there, name) == getattr(now, name) for name in names)
    return is_same and not _other_parts(there.contents, now.contents)


def _other_draws(there: DataRecord, here: DataRecord) -> str:
    other = [
        name for name in here.generators if there.generators.get(name, "") not in ("", here.generators[name])
    ]
    if not other:
        return ""
    return (
        f"before the loop the script drew other random numbers ({_listed(other)}) than when the run began, or when its newest state was trained. What it made of them"
        " and does not keep in State (a split, a data set, frozen weights) may be another one now, and the result then is as well."
        " Usually something is drawn only in the first generation: give that a generator of its own"
    )


def _other_parts(there: dict[str, str] | None, here: dict[str, str] | None) -> list[str]:
    """Parts that only one of them has may be new to this version, unless they share none."""
    if there is None or here is None:
        return []
    shared = [name for name in here if name in there]
    if not shared:
        return sorted(here or there)
    return [name for name in shared if there[name] != here[name]]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_ranks(records: list[DataRecord]) -> None:
    """Raises UsageError, with the first difference, unless all ranks have the same data."""
    for rank, record in enumerate(records):
        first = records[0]
        others = "contents", "generators", "recipe"
        names = [name for name in DataRecord.__slots__ if name not in others]
        for name in names:
            if getattr(record, name) != getattr(first, name):
                raise UsageError(
                    f"expected the same data on every rank, found {name.replace('_so_far', '')} "
                    f"{_text(name, getattr(first, name))} on rank 0 and {_text(name, getattr(record, name))} on rank {rank}; "
                    "give each rank the whole data set (its shards are divided among the ranks already), with weights and "
                    "an order that do not depend on the rank"
                )
        one, other = first.contents or {}, record.contents or {}
        if parts := [name for name in {**one, **other} if one.get(name) != other.get(name)]:
            raise UsageError(
                f"expected the same data on every rank, found other contents of {_listed(parts)} on rank {rank} than on rank 0; give each"
                f" rank the whole data set (its shards are divided among the ranks already). {_MAKE_ALIKE}"
            )


def _text(name: str, value: object) -> str:
    if name != "weights" and value == permutation.sha256():
        return f"the shuffle of large data sets ({value})"
    if name in ("weights", "order", "order_so_far"):
        return f"another one ({value})" if value else "none"
    return str(value)
