"""One look at a loop marks what its variables reach, and what objects of the State leave out.

What functions, classes and files of the recipe's own hold is reached by the variables that name
them (loop_variables.py); the order of reading decides which name a thing gets that has several.
"""

from dataclasses import replace
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic.data import stale_copies
from elastic.data.own_files import is_own_class
from elastic.errors import UsageError
from elastic.train import address_order, process_settings, structure
from elastic.train.address_hash import kind_of
from elastic.train.dataset_settings import DatasetSettings
from elastic.train.loop_look import Look
from elastic.train.loop_variables import LoopVariables
from elastic.train.namespaces import is_own_namespace, own_classes
from elastic.train.object_marks import Kind, Rules, Weight, containers
from elastic.train.object_parts import FREE
from elastic.train.object_walk import Walk, is_step
from elastic.train.own_code import filled_by_hooks
from elastic.train.saved_leaves import SavedLeaves, SavedNumbers
from elastic.train.saved_leaves import left_out as left_out_of
from elastic.train.state import State
from elastic.train.values import Values
from elastic.train.words import plain_text

_SAVES_ALL = (LRScheduler, torch.amp.GradScaler, Values)

# Of an object with a state_dict of its own: a tensor that is another one may be derived.
_OF_OBJECT = Rules(rebound=Weight.SAID, in_place=Weight.REFUSED, plain=Weight.SAID)


def take_look(
    state: State, settings: DatasetSettings, left_out: list[Any], variables: LoopVariables, passed: int
) -> Look:
    """passed: steps that are done. left_out: see LoopMemory.

    Raises UsageError for a set in the order of addresses that the loop iterates.
    """
    of_state = SavedLeaves(state.objects)
    walk = Walk(
        saved=of_state.storages,
        left_out={id(each) for held in left_out for each in (held, *own_classes(held))},
        assigned=frozenset(variables.assigned),
        outputs=filled_by_hooks(structure.submodules(state.modules)),
        cells=frozenset(variables.cells),
        rewritten=frozenset(variables.rewritten),
        kept=frozenset(id(kind) for held in settings.holders() for kind in (held, *type(held).__mro__)),
    )
    for each in state.objects.values():
        if _is_saved_by_torch(each):  # one that wraps it may hold these
            walk.left_out |= {id(held) for held in (each.state, each.param_groups, *each.param_groups)}
    saved = {name: _enter(walk, name, state.objects[name], of_state) for name in state.objects}
    # What functions read of a module by its variables is known better than its other data.
    for name, value in sorted(variables.carried, key=lambda each: is_own_namespace(each[1])):
        walk.enter(name, value, FREE, owner=_owner(value))
        if callable(value) and not isinstance(value, type):  # another criterion, say, from some step on
            walk.note_which(name, value)
    for (
        name,
        value,
    ) in variables.in_some:  # without a value they fail; weights that are kept may get another one
        if isinstance(value, nn.Module) or of_state.has_keys_of(value):
            walk.enter(name, value, replace(FREE, plain=Weight.NONE), owner=_owner(value))
    for name, value in variables.targets:
        if not is_step(value):
            walk.enter(name, value, FREE, owner="iterator")
    for patch in variables.patches:
        walk.note_patch(patch)
    collate = settings.collate
    if not isinstance(collate, MethodType | None):
        # What a closure or a partial holds has no other name.
        walk.enter("collate", collate, FREE.at_most(Weight.SAID))
    walk.sets |= _sets_of_loading(settings)
    if refused := address_order.refusal(walk.sets, variables.iterated):
        raise UsageError(refused)
    return Look(
        passed=passed,
        marks=walk.marks,
        saved={name: each for name, each in saved.items() if each is not None},
        leaves=of_state,
        read=variables.read_by_functions,
        read_by_loading=variables.read_by_loading,
        process=process_settings.read_settings(),
        after_loop=variables.after_loop,
        set_first=variables.set_first,
        unreadable=walk.unreadable,
    )


def _enter(walk: Walk, name: str, thing: Any, of_state: SavedLeaves) -> SavedNumbers | None:
    """Mark what an object of the State keeps outside its state_dict, or perhaps does."""
    if isinstance(thing, nn.Module):
        walk.module_of_state(name, thing)
        for path, tensor in left_out_of(name, thing, of_state):
            walk.enter(f"{name}.{path}", tensor, FREE, owner="left out")
        return SavedNumbers(is_module=True, numbers=frozenset())
    if _is_saved_by_torch(thing):
        walk.optimizer_of_state(name, thing)
        walk.functions_of_torch(name, thing)
        return None
    if isinstance(thing, _SAVES_ALL) and not _has_own_state_dict(thing):
        walk.left_out.add(id(thing))
        if isinstance(thing, LRScheduler):
            walk.functions_of_torch(name, thing)
        if isinstance(thing, Values):  # a load fills what a name of the loop may hold
            walk.left_out |= {id(each) for each in containers(list(vars(thing).values()))}
        return None
    if isinstance(thing, (Optimizer, LRScheduler)):
        walk.optimizer_of_state(name, thing, _OF_OBJECT, entry=name)
    else:
        walk.enter(name, thing, _OF_OBJECT, owner="object", entry=name)
    values = [value for _, value in of_state.of(name) if not isinstance(value, Tensor)]
    has_arrays = any(mark.entry == name and mark.kind is Kind.ARRAY for mark in walk.marks.values())
    return SavedNumbers(
        is_module=False,
        numbers=frozenset(map(plain_text, values)),
        contents=of_state.contents(name, with_arrays=has_arrays),
    )


def _is_saved_by_torch(thing: Any) -> TypeGuard[Optimizer]:
    return isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict


def _sets_of_loading(settings: DatasetSettings) -> dict[str, str]:
    held = stale_copies.attributes_of(settings.dataset, settings.collate)
    sets = {name: each.value for name, each in held.items() if isinstance(each.value, (set, frozenset))}
    return {name: kind for name, each in sets.items() if (kind := kind_of(each)) is not None}


def _has_own_state_dict(thing: Any) -> bool:
    """Whether the recipe says what it saves, which may be less than what torch's class does."""
    kind = next(each for each in type(thing).__mro__ if "state_dict" in vars(each))
    return is_own_class(kind)


def _owner(value: Any) -> str:
    return "module" if isinstance(value, (nn.Module, Optimizer)) else ""
