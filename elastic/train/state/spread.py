"""A state that some ranks have is brought to all, once to each machine whose ranks can share it.

Ranks of one machine map one memory (sealed_memory.py). To another machine the state goes once, to
one of its ranks, along a chain of machines: each passes a piece on while it receives the next. The
bytes are those of the rank that had them, which has verified them; what each rank loads of them is
compared afterwards (restore.py).
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from elastic.system.sealed_memory import SealedMemory, open_sealed, this_machine
from elastic.train.groups import ProcessGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The copy of a state that a rank has.

    data: uint8 [n] in host memory, None where it has none. memory: in which it lies, where `spread`
    is to close it. problem: why it lacks the copy that it should have.
    """

    data: Tensor | None = None
    memory: SealedMemory | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What one rank tells of its copy; path: where ranks of its machine can map it."""

    machine: str
    size_bytes: int
    path: str
    problem: str


def copy_in(memory: SealedMemory) -> Copy:
    """Of a state in it, which `spread` closes."""
    return Copy(data=torch.frombuffer(memory.view(), dtype=torch.uint8), memory=memory)


def spread(groups: ProcessGroups, own: Copy) -> Tensor | str:
    """uint8 [n] on every rank, or on every rank the first problem of any rank.

    At least one rank has a copy. A rank that has one keeps it. Raises PeerLost; OSError where there
    is no memory.
    """
    machine = this_machine()
    try:
        # In turn 2 ranks map what their machine has received; who cannot is sent it as well.
        for turn in (1, 2):
            size_bytes = 0 if own.data is None else len(own.data)
            path = "" if own.memory is None else own.memory.path
            place = _Place(machine=machine, size_bytes=size_bytes, path=path, problem=own.problem)
            places = groups.all_gather(place)
            if problems := [each.problem for each in places if each.problem]:
                return problems[0]
            if all(each.size_bytes for each in places):
                break
            if own.data is None:
                own = replace(own, data=_mapped(places, machine))
            has_it = groups.all_gather(own.data is not None)
            lacking = {rank: places[rank].machine for rank, has in enumerate(has_it) if not has}
            if not lacking:
                break
            source = next(rank for rank, each in enumerate(places) if each.size_bytes)
            receives = [*lacking]
            if turn == 1:
                machines = list(lacking.values())
                receives = [receives[machines.index(each)] for each in dict.fromkeys(machines)]
            own = _passed_along(groups, own, [source, *receives], places[source].size_bytes)
        assert own.data is not None, "it was passed to all that lack it"
        return own.data
    finally:
        if own.memory is not None:
            own.memory.close()


def _mapped(places: Sequence[_Place], machine: str) -> Tensor | None:
    for each in places:
        if each.path and each.machine == machine:
            with suppress(OSError, ValueError):  # it is sent then
                return torch.frombuffer(open_sealed(each.path), dtype=torch.uint8)
    return None


def _passed_along(groups: ProcessGroups, own: Copy, chain: list[int], size_bytes: int) -> Copy:
    """The copy of this rank afterwards."""
    if groups.rank not in chain:
        return own
    if own.data is not None:
        groups.pass_along(chain, size_bytes, own.data)
        return own
    memory = SealedMemory(size_bytes)
    groups.pass_along(chain, size_bytes, memory.write)  # an error ends the process, and its memory
    memory.seal()
    return copy_in(memory)
