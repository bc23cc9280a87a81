"""A run without a state of its own begins with its parent's numbers, on every rank alike.

Rank 0 reads the parent's checkpoint, verifies it and sends it to the others; a state in parts is
read by all. Every rank loads the entries that --from names. A run that does not fit its parent
gives its run directory back, so that a corrected command can have it.

Of another run's state an object takes all that fits it, and the recipe's own text holds.

- A module takes exactly its own names, shapes and dtypes.
- A torch optimizer takes tensors and counts; its hyperparameters are the recipe's, but for those
  that a schedule has set, if the schedule is taken too.
- A scheduler goes on from its saved position. Constants that the recipe builds otherwise now (its
  length, its base rates) are a misfit, for the saved ones would replace them unseen.
- Any other object takes what was saved, and it is said which of its numbers the recipe builds
  otherwise: nothing tells a counter from a setting.

It does not promise that objects are as they were where something does not fit: nothing may be
trained then.
"""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from elastic.checkpoint.find_parent import record_of
from elastic.checkpoint.payload_check import read_state
from elastic.checkpoint.record import parse
from elastic.config import identity
from elastic.config.run_dir import RunDir
from elastic.errors import CheckpointDamaged, StateDoesNotFit, StoreFailed, UsageError
from elastic.snapshot import image
from elastic.storage.remote import open_store
from elastic.storage.store import retrying
from elastic.system.sealed_memory import SealedMemory
from elastic.train.loop.build import LoopParts
from elastic.train.sharded.regroup import regroup_stored
from elastic.train.state.built import Structure, changes, check_order, settings_in, structure_of
from elastic.train.state.flat import FlatState, decode, encode_value
from elastic.train.state.spread import Copy, copy_in, spread
from elastic.train.state.state import State

STORAGE_PATIENCE_S = 60.0
MOST_NAMED = 4  # misfits in one sentence


def inherit(parts: LoopParts, parent: identity.Parent) -> None:
    """Give the objects the parent's state, on every rank.

    Raises UsageError on every rank where an entry does not fit, and on rank 0 where the parent's
    state is gone or damaged; StoreFailed on rank 0; PeerLost.
    """
    groups, state = parts.groups, parts.state
    saved = _read(parent, parts)
    problems, notes = load_entries(saved, state, parent.entries)
    misfits = next((of_rank for of_rank in groups.all_gather(problems) if of_rank), None)
    if misfits is not None:
        if groups.rank == 0:
            # It was claimed for a run that never trained. The next command claims it again.
            with suppress(StoreFailed):
                parts.store.delete(identity.NAME)
        # The agent ends all ranks when the first one has left: none may leave before that.
        groups.from_rank0("given back")
        more = f"; and {len(misfits) - MOST_NAMED} more" if len(misfits) > MOST_NAMED else ""
        raise UsageError(
            f"expected {parent} to fit this recipe, found: {'; '.join(misfits[:MOST_NAMED])}{more}. Correct the recipe, or name "
            f"the entries to take: --from {parent.url}@{parent.step}:ENTRY,... (the others begin as the recipe builds them)"
        )
    if groups.rank == 0:
        taken = sorted(parent.entries or state.objects)
        where = f"step {parent.step} of {parent.url} (digest {parent.digest[:16]})"
        print(f"begins from {where}, entries {', '.join(taken)}; steps count from 1")
        if fresh := sorted(state.objects.keys() - set(taken)):
            notes = [*notes, f"{', '.join(fresh)}: as the recipe builds it"]
        for note in notes:
            print(f"  {note}")


def _read(parent: identity.Parent, parts: LoopParts) -> FlatState:
    """The parent's state, on every rank, as its objects take it.

    Raises UsageError and StoreFailed, on the rank that has found the reason; PeerLost.
    """
    groups, state, clock = parts.groups, parts.state, parts.clock
    store, text = open_store(RunDir.parse(parent.url).checkpoints_url), ""
    asked = partial(retrying, clock=clock, deadline=clock.monotonic() + STORAGE_PATIENCE_S)
    try:
        if groups.rank == 0:
            text = asked(partial(record_of, parent, store, clock)).to_json().decode()
        record = parse(groups.from_rank0(text).encode())

        def read(number: int) -> SealedMemory:
            return asked(partial(read_state, store, record.payloads[number], clock))

        if state.sharded is None and not record.parts:
            data = spread(groups, copy_in(read(0)) if groups.rank == 0 else Copy())
            assert isinstance(data, Tensor), "rank 0 has read it"
            return FlatState.read(*image.read(data.numpy().data))
        found = regroup_stored(groups, state, record, read)
        if isinstance(found, str):
            raise CheckpointDamaged(found)
        return FlatState.read(*found)
    except CheckpointDamaged as error:
        raise UsageError(
            f"expected {parent}, from which this run begins, found it damaged: {error}; "
            "take another state with --from, and another --run-dir"
        ) from error


MOST_NOTED = 4  # numbers of one entry
_GROUPS = "param_groups"
# What schedulers, and parameters with names, add to the groups.
_OF_SCHEDULERS = {"param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
# The entries of a scheduler's state that its steps change.
_POSITION = {"last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"}
_POSITION |= {"T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"}


def load_entries(saved: FlatState, state: State, entries: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Load these entries of a saved state, all for none; (what does not fit, notes for people)."""
    wanted = set(entries) or saved.document.keys() | state.objects.keys()
    problems = [
        f"no entry {name} {where}"
        for where, names in (("there", saved.document), ("here", state.objects))
        for name in sorted(wanted - names.keys())
    ]
    if problems:
        return problems, []
    part = State(**{name: thing for name, thing in state.objects.items() if name in wanted})
    part.sharded = state.sharded
    fitted, problems, notes = _fitted(saved, part)
    if problems:
        return problems, notes
    try:
        if "now" in saved.about:
            groups = structure_of(state.objects).groups
            ours = {name: each for name, each in groups.items() if name.split(".")[0] in wanted}
            check_order(Structure.read(saved, "now").groups, ours, "there")
        part.load(fitted)
    except (CheckpointDamaged, StateDoesNotFit, UsageError) as error:
        problems = [str(error)]
    return problems, notes


def _fitted(saved: FlatState, part: State) -> tuple[FlatState, list[str], list[str]]:
    """(the saved state as these objects take it, what does not fit, notes)."""
    schedulers = [thing for thing in part.objects.values() if isinstance(thing, LRScheduler)]
    tensors: dict[str, Tensor] = {}
    document, notes, problems = {}, list[str](), list[str]()
    for name, thing in part.objects.items():
        theirs = decode(saved.document[name], lambda entry, _: saved.tensors[entry])
        ours, words = thing.state_dict(), list[str]()
        is_fitted = isinstance(thing, Optimizer) and _GROUPS in ours and _GROUPS in theirs
        if isinstance(thing, LRScheduler):
            words = _other_constants(name, theirs, ours)
        elif not is_fitted and not isinstance(thing, nn.Module):
            found = changes(*(dict(settings_in(value, name)) for value in (theirs, ours)))
            more = f" and {len(found) - MOST_NOTED} more" if len(found) > MOST_NOTED else ""
            notes += [f"as it was saved: {'; '.join(found[:MOST_NOTED])}{more}"] if found else []
        elif is_fitted and not (words := _other_groups(name, theirs, ours)):
            goes_on = {key for each in schedulers if each.optimizer is thing for key in _set_by(each)}
            groups = [
                # Other parameters, or more groups, are refused by the load.
                here | {key: there[key] for key in (goes_on & here.keys() | {"params"}) & there.keys()}
                for there, here in zip_longest(
                    theirs[_GROUPS], ours[_GROUPS][: len(theirs[_GROUPS])], fillvalue=dict[str, Any]()
                )
            ]
            theirs[_GROUPS] = groups
        if words:
            problems += words
        elif is_fitted:
            document[name] = encode_value(thing, theirs, name, tensors)
        else:
            document[name] = saved.document[name]
            tensors |= {key: each for key, each in saved.tensors.items() if key.startswith(f"{name}.")}
    return replace(saved, tensors=dict(sorted(tensors.items())), document=document), problems, notes


def _set_by(scheduler: LRScheduler) -> set[str]:
    """The hyperparameters that a scheduler sets at each of its steps."""
    return {"lr", "momentum", "betas"} if getattr(scheduler, "cycle_momentum", False) else {"lr"}


def _other_constants(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    words = []
    for key in sorted(theirs.keys() | ours.keys()):
        there, here = _plain(theirs.get(key)), _plain(ours.get(key))
        if key == "_schedulers" and there and here:
            for number, pair in enumerate(zip(there, here, strict=False)):
                words += _other_constants(f"{name}[{number}]", *pair)
        elif key not in _POSITION and there != here:
            words.append(f"{name}.{key} is {there} there and {here} here")
    return words


def _plain(value: Any) -> Any:
    """Whose tensors are numbers, from whichever device."""
    return tree_map(lambda each: each.tolist() if isinstance(each, Tensor) else each, value)


def _other_groups(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Another version of torch has more hyperparameters; another optimizer has others."""
    there, here = (
        {key for group in each[_GROUPS] for key in group} - _OF_SCHEDULERS for each in (theirs, ours)
    )
    if there <= here or here <= there:
        return []
    only = [", ".join(sorted(keys)) for keys in (there - here, here - there)]
    return [f"{name}.{_GROUPS} has {only[0]} there and {only[1]} here"]
