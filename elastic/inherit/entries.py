"""Of another run's state an object takes all that fits it, and the recipe's own text holds.

- A module takes exactly its own names, shapes and dtypes.
- A torch optimizer takes tensors and counts, not hyperparameters (fit_optimizer.py).
- A scheduler goes on from its saved position. Constants that the recipe builds otherwise now (its
  length, its base rates) are a misfit, for the saved ones would replace them unseen.
- Any other object takes what was saved, and it is said which of its numbers the recipe builds
  otherwise: nothing tells a counter from a setting.

It does not promise that objects are as they were where something does not fit: nothing may be
trained then.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic.errors import CheckpointDamaged, StateDoesNotFit, UsageError
from elastic.inherit.optimizer import GROUPS, fit_optimizer, other_shapes, set_by
from elastic.train.state.built import Structure, check_order, structure_of
from elastic.train.state.document import entries_of
from elastic.train.state.flat import FlatState
from elastic.train.state.state import State

MOST_NOTED = 4  # numbers of one entry
# What does not fit, in words, by the name of its entry; under "" where that is not known.
Problems = dict[str, list[str]]
# The entries of a scheduler's state that its steps change.
_POSITION = {"last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"}
_POSITION |= {"T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"}


def load_entries(saved: FlatState, state: State, entries: tuple[str, ...]) -> tuple[Problems, list[str]]:
    """Load these entries of a saved state, all for none; (what does not fit, notes for people)."""
    there, here = set(saved.document), set(state.objects)
    wanted = set(entries) or there | here
    problems = {
        name: [f"no entry {name} {'here' if name in there else 'there'}"]
        for name in sorted(wanted - (there & here))
    }
    if problems:
        return problems, []
    part = State(**{name: thing for name, thing in state.objects.items() if name in wanted})
    fitted, problems, notes = _fitted(saved, part)
    return problems or _other_order(saved, state, wanted) or _load(fitted, part), notes


def _other_order(saved: FlatState, state: State, wanted: set[str]) -> Problems:
    """What an optimizer's groups have in another place than there."""
    if "now" in saved.about:
        groups = structure_of(state.objects).groups
        ours = {name: groups[name] for name in groups if name in wanted}
        try:
            check_order(Structure.read(saved, "now").groups, ours, "there")
        except UsageError as error:
            return {"": [str(error)]}
    return {}


def _fitted(saved: FlatState, state: State) -> tuple[FlatState, Problems, list[str]]:
    """(the saved state as these objects take it, what does not fit, notes)."""
    built = state.flatten()
    schedulers = [thing for thing in state.objects.values() if isinstance(thing, LRScheduler)]
    tensors: dict[str, Tensor] = {}
    document, notes, problems = {}, list[str](), Problems()
    for name, thing in state.objects.items():
        theirs, ours = _below(name, saved.tensors), _below(name, built.tensors)
        document[name] = saved.document[name]
        if isinstance(thing, nn.Module):
            problems[name] = _other_tensors(theirs, ours)
        if isinstance(thing, Optimizer) and GROUPS in thing.state_dict():
            moved = {key for each in schedulers if each.optimizer is thing for key in set_by(each)}
            taken = fit_optimizer(name, saved, built, moved)
            document[name], theirs = taken.value, taken.tensors
            problems[name] = taken.problems
            notes += taken.notes
        elif isinstance(thing, LRScheduler):
            problems[name] = _other_scheduler(name, document[name], built.document[name])
        elif not isinstance(thing, nn.Module):
            notes += _replaced(name, document[name], built.document[name])
        tensors |= theirs
    fitted = replace(saved, tensors=dict(sorted(tensors.items())), document=document)
    return fitted, _only_found(problems), notes


def _load(fitted: FlatState, state: State) -> Problems:
    """What turns out not to fit."""
    schedulers = {name: thing for name, thing in state.objects.items() if isinstance(thing, LRScheduler)}
    built = {name: copy.deepcopy(thing.state_dict()) for name, thing in schedulers.items()}
    refusal = Problems()
    try:
        state.load(fitted)
    except (CheckpointDamaged, StateDoesNotFit) as error:
        refused = (name for name in state.objects if str(error).startswith(f"{name} "))
        refusal = {next(refused, ""): [str(error)]}
    # What an object refuses is often one of these, which say it in the recipe's words.
    problems = {
        name: _other_constants(name, built[name], thing.state_dict()) for name, thing in schedulers.items()
    }
    for name, thing in state.objects.items():
        if isinstance(thing, Optimizer):
            problems[name] = other_shapes(name, thing)
    return _only_found(problems) or refusal


def _only_found(problems: Problems) -> Problems:
    return {name: words for name, words in problems.items() if words}


def _other_tensors(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> list[str]:
    words = []
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in theirs or name not in ours:
            words.append(f"no tensor {name} {'here' if name in theirs else 'there'}")
        elif (there := _form(theirs[name])) != (here := _form(ours[name])):
            words.append(f"{name} is {there} there and {here} here")
    return words


def _replaced(name: str, theirs: Any, ours: Any) -> list[str]:
    """What an object holds otherwise once it has taken what was saved, in one note."""
    there, here = dict(_numbers(theirs)), dict(_numbers(ours))
    words = [
        f"{path} {there[path]} (the recipe builds {here[path]})"
        for path in there.keys() & here.keys()
        if there[path] != here[path]
    ]
    more = [f"and {len(words) - MOST_NOTED} more"] if len(words) > MOST_NOTED else []
    return [f"{name}, as it was saved: {', '.join([*sorted(words)[:MOST_NOTED], *more])}"] if words else []


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of the numbers and texts in a value that is written down."""
    items = entries_of(value)
    if items is not None:
        for name, item in items:
            yield from _numbers(item, f"{path}.{name}" if path else str(name))
    elif not isinstance(value, dict):
        yield path, value
    elif "tensor" not in value:
        ((_, number),) = value.items()
        yield path, number


def _other_scheduler(name: str, theirs: Any, ours: Any) -> list[str]:
    """Of another class, by what their states hold; one of those may fail to load the other's."""
    there, here = ({str(key) for key, _ in entries_of(each) or []} - _POSITION for each in (theirs, ours))
    if not (there - here and here - there):
        return []
    names = [", ".join(sorted(each)) for each in (there - here, here - there)]
    return [f"{name} is another scheduler, with {names[0]} there and {names[1]} here"]


def _other_constants(name: str, built: Any, loaded: Any) -> list[str]:
    words = []
    for key in sorted(built.keys() | loaded.keys()):
        ours, theirs = built.get(key), loaded.get(key)
        if key == "_schedulers":
            for number, pair in enumerate(zip(ours, theirs, strict=False)):
                words += _other_constants(f"{name}[{number}]", *pair)
        elif key not in _POSITION and not _is_equal(ours, theirs):
            words.append(f"{name}.{key} is {theirs} there and {ours} here")
    return words


def _is_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_is_equal, ours, theirs))
    return bool(ours == theirs)


def _below(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {each: tensor for each, tensor in tensors.items() if each.startswith(f"{name}.")}


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
