"""A state that some ranks have is brought to all, and no machine receives it twice.

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

from elastic.checkpoint.record import CommitRecord
from elastic.storage.store import Store
from elastic.system.clock import Clock
from elastic.system.sealed_memory import SealedMemory, open_sealed, this_machine
from elastic.train.process_groups import ProcessGroups
from elastic.uploader.state_check import read_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The copy of a state that a rank has.

    data: uint8 [n] in host memory, None where it has none. sealed: the memory in which it lies, if
    others can map it. problem: what is wrong with the copy that it should have.
    """

    data: Tensor | None = None
    sealed: SealedMemory | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What one rank tells of its copy; path: where ranks of its machine can map it."""

    machine: str
    size_bytes: int
    path: str
    problem: str


def read_copy(groups: ProcessGroups, store: Store, record: CommitRecord, clock: Clock) -> Copy:
    """A checkpoint's state, in memory that can be mapped where other ranks need it.

    Raises as `read_state`.
    """
    sealed: SealedMemory | None = None
    if groups.world_size > 1:
        with suppress(OSError, OverflowError, ValueError):  # too large, or no memfd: memory of this process
            sealed = SealedMemory(record.size_bytes)
    if sealed is None:
        return Copy(data=torch.frombuffer(read_state(store, record, clock), dtype=torch.uint8))
    try:
        read_state(store, record, clock, sealed.body)
        return Copy(data=torch.frombuffer(sealed.seal(), dtype=torch.uint8), sealed=sealed)
    except BaseException:
        sealed.close()
        raise


def spread(groups: ProcessGroups, own: Copy) -> Tensor | str:
    """uint8 [n] on every rank, or on every rank the problem of the first one that has any.

    At least one rank has a copy. A rank that has one keeps it. Raises PeerLost.
    """
    machine = this_machine()
    try:
        # A second turn only where the ranks of a machine cannot map each other's memory.
        for receives in (_one_of_each_machine, _all):
            places = groups.all_gather(_place_of(machine, own))
            if problems := [each.problem for each in places if each.problem]:
                return problems[0]
            if own.data is None:
                own = replace(own, data=_mapped(places, machine))
            has_it = groups.all_gather(own.data is not None)
            if not all(has_it):
                lacking = [rank for rank, has in enumerate(has_it) if not has]
                source = next(rank for rank, each in enumerate(places) if each.size_bytes)
                chain = [source, *receives(lacking, places)]
                own = _passed_along(groups, own, chain, places[source].size_bytes)
        assert own.data is not None, "it was passed to all that lack it"
        return own.data
    finally:
        if own.sealed is not None:
            own.sealed.close()


def _place_of(machine: str, own: Copy) -> _Place:
    return _Place(
        machine=machine,
        size_bytes=0 if own.data is None else len(own.data),
        path="" if own.sealed is None else own.sealed.path,
        problem=own.problem,
    )


def _mapped(places: Sequence[_Place], machine: str) -> Tensor | None:
    for each in places:
        if each.path and each.machine == machine:
            with suppress(OSError, ValueError):  # it is sent then
                return torch.frombuffer(open_sealed(each.path), dtype=torch.uint8)
    return None


def _one_of_each_machine(lacking: Sequence[int], places: Sequence[_Place]) -> list[int]:
    return list({places[rank].machine: rank for rank in reversed(lacking)}.values())[::-1]


def _all(lacking: Sequence[int], _places: Sequence[_Place]) -> list[int]:
    return list(lacking)


def _passed_along(groups: ProcessGroups, own: Copy, chain: list[int], size_bytes: int) -> Copy:
    """The copy of this rank afterwards."""
    if groups.rank not in chain:
        return own
    if own.data is not None:
        groups.pass_along(own.data, chain)
        return own
    sealed: SealedMemory | None = None
    with suppress(OSError, OverflowError, ValueError):
        sealed = SealedMemory(size_bytes)
    if sealed is None:
        data = torch.empty(size_bytes, dtype=torch.uint8)
        groups.pass_along(data, chain)
        return replace(own, data=data)
    groups.pass_along(torch.frombuffer(sealed.body, dtype=torch.uint8), chain)
    return replace(own, data=torch.frombuffer(sealed.seal(), dtype=torch.uint8), sealed=sealed)
