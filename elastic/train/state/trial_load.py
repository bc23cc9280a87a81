"""What a load does to a recipe's objects happens in every run; one that is not exact is refused.

A process that resumes builds its objects and loads a state into them. So a process that begins a
run loads what it has built, by the same code: whatever a load changes is then changed in both.
Objects with a load_state_dict of their own do it again after the run's first step, when they have
what steps give them.

A list that a state_dict makes of a set has another order after a load, and the same one in a trial,
where little was added or removed. So such sets iterate backwards for one more call of state_dict.

It finds no attribute that neither state_dict gives nor a load changes.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from elastic.errors import CheckpointDamaged, StateDoesNotFit, StateNotSavable, UsageError
from elastic.train.state.document import Order, encode
from elastic.train.state.flat import FlatState
from elastic.train.state.load import has_own_load, load_module, order_of
from elastic.train.state.state import State, saved_entry
from elastic.train.state.state_contents import difference, reordered

Plain = Mapping[str, Mapping[str, Any]]


def load_as_built(state: State) -> None:
    """Raises UsageError for an object that a load leaves in another state."""
    if found := _load(state, list(state.objects)):
        raise UsageError(_sentence("before the first step", found))
    _check_sets(state)


def load_own_again(state: State) -> None:
    """After the first step. Raises UsageError also for a number that only an attribute keeps."""
    names = [name for name, thing in state.objects.items() if has_own_load(thing)]
    if not names:
        return
    before = _plain_attributes(state, names)
    if found := _load(state, names) or _first_change(before, _plain_attributes(state, names)):
        raise UsageError(_sentence("after the first step", found))
    _check_sets(state)


def _load(state: State, names: list[str]) -> str:
    """Load into these objects what they hold; returns what then differs in the whole state."""
    flat = state.flatten()
    expected = state.contents(flat)
    not_loaded = {entry: each for entry, each in flat.tensors.items() if entry.split(".")[0] not in names}
    before = _storages(state, flat)
    try:
        for name in names:
            if isinstance(module := state.objects[name], nn.Module):
                load_module(module, saved_entry(flat, name), is_trial=True)
        parts = state.load_others(flat, names, not_loaded)
        flat = state.flatten()  # what was flattened before may hold parts that the load replaced
        for name, of_one in parts.items():
            if left := of_one.left_behind():
                return (
                    f"{name}{left[0]} is another object now, and something still holds the one before, whose changes would be lost; let "
                    f"load_state_dict change it in its place, as self.array[...] = saved does, and generators by their set_state"
                )
        return difference(expected, state.contents(flat), is_exact=True) or _torn(
            before, _storages(state, flat)
        )
    except (StateDoesNotFit, CheckpointDamaged, StateNotSavable) as error:
        return str(error)


class _Backwards(set[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([*super().__iter__()][::-1])


def _check_sets(state: State) -> None:
    """Raises UsageError for a list or dict in a state_dict that has the order of a set."""
    for name, thing in state.objects.items():
        if not has_own_load(thing) or isinstance(thing, nn.Module):
            continue
        attributes = getattr(thing, "__dict__", {})
        sets = {
            key: each for key, each in attributes.items() if type(each) in (set, frozenset) and len(each) > 1
        }
        if not sets:
            continue
        before = encode(thing.state_dict(), name, {}, Order.KEPT)
        try:
            attributes.update({key: _Backwards(each) for key, each in sets.items()})
            backwards = encode(thing.state_dict(), name, {}, Order.KEPT)
        finally:
            attributes.update(sets)
        if path := reordered(name, before, backwards):
            raise UsageError(
                f"{path}: its state_dict gives the elements of a set in the order in which they come, and a set that load_state_dict makes again has another order, "
                "so that no state with it could be resumed from: give sorted(...) of the set there, or keep a list or dict.fromkeys(...) in its place"
            )


def _storages(state: State, flat: FlatState) -> dict[str, str]:
    """Of each tensor that shares memory with others, a part at least: the first that does.

    A state that was saved does not say it. Schedules share an optimizer's learning rate, if it is a
    tensor, until a load makes copies.
    """
    free = {name for name, thing in state.objects.items() if order_of(thing) is Order.FREE}
    first_in: dict[int, str] = {}
    tensors = sorted(
        (name, tensor) for name, tensor in flat.tensors.items() if name.split(".")[0] not in free
    )
    found = {
        name: first_in.setdefault(tensor.untyped_storage().data_ptr(), name)
        for name, tensor in tensors
        if tensor.numel()
    }
    return {name: first for name, first in found.items() if name != first}


def _torn(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    for name, first in before.items():
        if now.get(name) != first:
            return f"{name}: it shared a part of the memory of {first}, and does not any more"
    return ""


def _sentence(when: str, found: str) -> str:
    return (
        f"a trial load {when}, of what the objects' own state_dict gives, did not leave the State as it was: {found}. A run that resumes "
        "would go on differently: load_state_dict must take what state_dict gave, and put all of it back"
    )


def _plain_attributes(state: State, names: Iterable[str]) -> Plain:
    """Numbers and words that objects have as attributes, whether or not they save them."""
    attributes = {name: getattr(state.objects[name], "__dict__", {}) for name in names}
    return {
        name: {key: value for key, value in of_one.items() if type(value) in (bool, int, float, str)}
        for name, of_one in attributes.items()
    }


def _first_change(before: Plain, now: Plain) -> str:
    for name, attributes in before.items():
        for key, value in attributes.items():
            found = now[name].get(key)
            if found != value and value == value:  # noqa: PLR0124 - a NaN is not
                return f"{name}.{key} was {value!r} and is {found!r}; its state_dict does not give it"
    return ""
