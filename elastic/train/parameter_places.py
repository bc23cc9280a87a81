"""Parameters stay where the loop found them: in the modules, in memory, and in optimizers' groups.

A load gives weights back by their names in the modules, and an optimizer's state by the places in
its groups. Both would belong to other parameters where the loop has changed the order, or which of
them are one. So groups may only be added, no parameter takes the place of another, and those that
share memory are the same as before. What a loop adds, and modules with other parameters that it
puts into the places of others, other modules follow (as_built.py, reshaped.py).

It does not see buffers, and memory that other tensors than parameters share.
"""

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic.errors import UsageError
from elastic.train import structure
from elastic.train.object_marks import storage_of
from elastic.train.parameter_marks import ParameterMarks
from elastic.train.state import State
from elastic.train.structure import StateParts

_BY_PLACES = (
    "A resume gives an optimizer's state back by the places in its groups, and weights by their names"
)


class _Groups(NamedTuple):
    """keys: of each parameter its first name in the modules, or its id where none has it."""

    sizes: list[int]
    parameters: list[nn.Parameter]
    keys: list[str | int]


class _Range(NamedTuple):
    """The bytes in memory from the first to the last element, the end excluded."""

    start: int
    end: int


class _Places(NamedTuple):
    """names: in the modules, by id. memory: by name, a tied one's under each of its names."""

    owned: dict[int, nn.Parameter]
    addresses: list[int]
    names: dict[int, str]
    memory: dict[str, _Range]
    groups: dict[Optimizer, _Groups]


class ParameterPlaces:
    """Of the parameters of a state, as they are where this object is made."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._places = _places_of(state)

    def check_groups(self, step: int) -> None:
        """Raises UsageError where the loop has changed groups, and not added some.

        It takes five microseconds for 150 parameters.
        """
        for optimizer in self._state.optimizers:
            before = self._places.groups.get(optimizer)
            groups = optimizer.param_groups
            found = list(chain.from_iterable(group["params"] for group in groups))
            sizes = [len(group["params"]) for group in groups]
            if before is None or sizes != before.sizes or not structure.same(found, before.parameters):
                self._check(step)
                return

    def check(self, step: int, parts: StateParts, marks: ParameterMarks) -> None:
        """Raises UsageError where parameters have changed places in the modules or in memory.

        parts, marks: of the state and of the parameters that it owns, now.
        """
        if parts.owned is not self._places.owned or marks.addresses != self._places.addresses:
            self._check(step)

    def _check(self, step: int) -> None:
        before, now = self._places, _places_of(self._state)
        known = {*before.names.values(), *(key for each in before.groups.values() for key in each.keys)}
        for optimizer, groups in now.groups.items():
            if optimizer in before.groups:
                self._check_optimizer(step, optimizer, before.groups[optimizer], groups, known)
        _check_memory(step, before.memory, now.memory)
        self._places = now

    def _check_optimizer(
        self, step: int, optimizer: Optimizer, before: _Groups, now: _Groups, known: set[str | int]
    ) -> None:
        kind = type(optimizer).__name__
        there = {*now.keys, *map(id, now.parameters)}
        both = zip(before.parameters, before.keys, strict=True)
        if gone := [p for p, key in both if not there & {key, id(p)}]:
            raise UsageError(
                f"step {step}: the loop has taken {self._name(gone[0], before)} out of the groups of {kind}. {_BY_PLACES}, and nothing can save an optimizer that "
                "still has a state of such a parameter (optimizer.state_dict() raises a KeyError). To train some parameters no longer, let their group stay and "
                "freeze them: for p in group['params']: p.requires_grad_(False)"
            )
        if now.sizes[: len(before.sizes)] != before.sizes and (more := set(now.keys) - set(before.keys)):
            first = next(p for p, key in zip(now.parameters, now.keys, strict=True) if key in more)
            raise UsageError(
                f"step {step}: the loop has put {self._name(first, now)} into a group of {kind} that was there before. {_BY_PLACES}, and the script builds that group without it. "
                "Give it a group of its own: optimizer.add_param_group({'params': [parameter]}), which is there again after a resume"
            )
        is_larger = now.sizes[: len(before.sizes)] == before.sizes  # by groups alone
        pairs = enumerate(zip(before.keys, now.keys, strict=False))
        place = next((n for n, (was, key) in pairs if was != key and key in known), None)
        if place is None and is_larger:
            return
        place = _border(before.sizes, now.sizes) if place is None else place
        number, index = _place_in(now.sizes, place)
        was_at, _ = _place_in(before.sizes, place)
        former = self._name(before.parameters[place], before)
        was = former if was_at == number else f"{former}, of param_groups[{was_at}],"
        raise UsageError(
            f"step {step}: {self._name(now.parameters[place], now)} stands at {kind}.param_groups[{number}]['params'][{index}], where {was} stood: the loop has moved "
            f"parameters among the groups, or among the modules. {_BY_PLACES}: leave them where they are, and change the settings of their groups, "
            "group['lr'] = 0.01; where some of them will need other settings, build a group for these before the loop"
        )

    def _name(self, parameter: Tensor, groups: _Groups) -> str:
        """As it was when these groups were read."""
        key = next(k for p, k in zip(groups.parameters, groups.keys, strict=True) if p is parameter)
        return key if isinstance(key, str) else self._state.name_of(parameter)


def _places_of(state: State) -> _Places:
    """As they are now."""
    owned = state.parts().owned
    names: dict[int, str] = {}
    memory: dict[str, _Range] = {}
    for path, module in state.named_modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001 - with those that are tied
            if parameter is not None:
                names.setdefault(id(parameter), f"{path}.{name}")
                memory[f"{path}.{name}"] = _range_of(parameter)
    addresses = list(map(Tensor.data_ptr, owned.values()))
    groups = {each: _groups_of(each, names) for each in state.optimizers}
    return _Places(owned, addresses, names, memory, groups)


def _groups_of(optimizer: Optimizer, names: dict[int, str]) -> _Groups:
    groups = [list(group["params"]) for group in optimizer.param_groups]
    parameters = list(chain.from_iterable(groups))
    return _Groups(list(map(len, groups)), parameters, [names.get(id(p), id(p)) for p in parameters])


def _check_memory(step: int, before: dict[str, _Range], memory: dict[str, _Range]) -> None:
    both = [name for name in memory if name in before]
    was, now = (_first_names(each, both) for each in (before, memory))
    for name in both:
        if was[name] != now[name]:
            others = now[name] if now[name] != name else was[name]
            found = "shares" if now[name] != name else "no longer shares"
            raise UsageError(
                f"step {step}: {name} {found} the memory of {others} since the loop has given one of them another tensor. A resume builds both as the script does, and "
                "copies the saved numbers into them: tie weights, or give each its own, before elastic.State; in the loop copy the numbers, "
                "with torch.no_grad(): parameter.copy_(other)"
            )


def _border(before: list[int], now: list[int]) -> int:
    """The place of the first parameter that is in another group, in an order that stayed."""
    differing = next(n for n, (was, size) in enumerate(zip(before, now, strict=False)) if was != size)
    return sum(now[:differing]) + min(before[differing], now[differing])


def _place_in(sizes: list[int], place: int) -> tuple[int, int]:
    for number, size in enumerate(sizes):
        if place < size:
            return number, place
        place -= size
    return len(sizes), place


def _range_of(parameter: Tensor) -> _Range:
    """Empty where it has none that can be told, as on the meta device."""
    if parameter.layout is not torch.strided or not parameter.numel() or not storage_of(parameter):
        return _Range(0, 0)
    pairs = zip(parameter.shape, parameter.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in pairs)
    start = parameter.data_ptr()
    return _Range(start, start + elements * parameter.element_size())


def _first_names(memory: dict[str, _Range], names: list[str]) -> dict[str, str]:
    """Of each of these names the first one among those with which it shares memory.

    Parts of one vector that do not overlap share none, as `vector_to_parameters` makes them.
    """
    order = {name: number for number, name in enumerate(names)}
    firsts, end, of_one = dict[str, str](), 0, list[str]()
    for name in sorted(names, key=lambda each: memory[each]):
        if memory[name].start >= end:
            of_one = []
        of_one.append(name)
        end = max(end, memory[name].end)
        first = min(of_one, key=order.__getitem__)
        firsts |= dict.fromkeys(of_one, first)
    return firsts
