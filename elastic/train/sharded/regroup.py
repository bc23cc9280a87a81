"""A state in parts comes to ranks that cut it otherwise, or not at all: each gets rows it needs.

A part is held by one rank, which has verified all of it, in memory or from storage. Its rows go
from there to the ranks that need them. Beside what it needs, a rank holds one stored part at a
time. A state that is not cut counts as one part.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from elastic.checkpoint.record import CommitRecord
from elastic.errors import CheckpointDamaged
from elastic.snapshot import safetensors_header
from elastic.snapshot.division import Division, chunk, uncut
from elastic.snapshot.image import NAMES
from elastic.snapshot.safetensors_header import Header
from elastic.snapshot.sharded import of_rows
from elastic.system.sealed_memory import SealedMemory
from elastic.train.groups import ProcessGroups
from elastic.train.state.flat import FlatState
from elastic.train.state.load import sharded_like
from elastic.train.state.state import State

_Held = tuple[Header, memoryview]  # of a part, and its image
Read = tuple[dict[str, Tensor], Any]  # as image.read has it: tensors, and the document
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


def regroup_stored(
    groups: ProcessGroups, state: State, record: CommitRecord, read: Callable[[int], SealedMemory]
) -> Read | str:
    """`regroup` of a checkpoint, each part of which one rank reads."""

    def load(number: int) -> memoryview:
        with closing(read(number)) as memory:
            return memory.view()

    holders = [number % groups.world_size for number in range(len(record.payloads))]
    return regroup(groups, state, holders, load)


def regroup(
    groups: ProcessGroups,
    state: State,
    holders: Sequence[int],
    load: Callable[[int], memoryview],
) -> Read | str:
    """The state, sharded as the objects hold it; or on every rank the first problem of any rank.

    holders: by part, the rank that has it. load: gives a verified part of this rank, and raises
    CheckpointDamaged or OSError where that cannot be had; called once for each, by groups of
    as many parts as there are ranks. Raises PeerLost, and what else `load` raises.
    """
    regrouping: _Regrouping | None = None
    for first in range(0, len(holders), groups.world_size):
        numbers = range(first, min(first + groups.world_size, len(holders)))
        held, problem = dict[int, _Held](), ""
        try:
            for number in numbers:
                if holders[number] == groups.rank:
                    image = load(number)
                    held[number] = safetensors_header.parse(image), image
        except (CheckpointDamaged, OSError) as error:
            problem = str(error)
        if problem := _first_problem(groups, problem):
            return problem
        try:
            if regrouping is None:
                head = _head_of_first(groups, holders[0], held.get(0))
                regrouping = _Regrouping(groups, state, head)
            if regrouping.division.of != len(holders):
                raise CheckpointDamaged(f"expected {regrouping.division.of} parts, found {len(holders)}")
            regrouping.division.check({n: header for n, (header, _) in held.items()}, regrouping.document)
        except CheckpointDamaged as error:
            problem = str(error)
        if problem := _first_problem(groups, problem):
            return problem
        assert regrouping is not None, "its header is the same on every rank"
        regrouping.exchange({number: holders[number] for number in numbers}, held)
    assert regrouping is not None, "a state has a part"
    return regrouping.read()


class _Regrouping:
    def __init__(self, groups: ProcessGroups, state: State, header: Header) -> None:
        self._groups = groups
        self.document = header.document
        FlatState.read({}, self.document)
        self.division = division = Division.of_header(header)
        live = state.flatten().tensors if state.sharded is not None else {}
        were_sharded = header.document["about"].get("sharded", ())
        self._like = sharded_like(division.shapes, were_sharded, live, state.objects)
        self._strides: dict[str, list[int]] = {}
        self._own = {name: self._empty(name) for name in division.shapes}

    def _empty(self, name: str) -> Tensor:
        shape = self.division.shapes[name]
        rows = [len(self._rows(name, self._groups.rank))] if shape else []
        return torch.empty([*rows, *shape[1:]], dtype=NAMES[self.division.dtypes[name]])

    def _rows(self, name: str, rank: int) -> range:
        """Those that a rank needs."""
        shape = self.division.shapes[name]
        rows = shape[0] if shape else 1
        return chunk(rows, rank, self._groups.world_size) if name in self._like else range(rows)

    def exchange(self, holders: dict[int, int], held: dict[int, _Held]) -> None:
        me, division = self._groups.rank, self.division
        own = {name: each for header, _ in held.values() for name, each in header.strides.items()}
        for of_rank in self._groups.all_gather(own):
            self._strides |= {name: list(each) for name, each in of_rank.items()}

        def shared(number: int, rank: int) -> list[tuple[str, range, range]]:
            """(name, rows that a part has and a rank needs, rows of the part)."""
            both = []
            for name in division.shapes:
                there, here = division.rows_of(name, number), self._rows(name, rank)
                rows = range(max(there.start, here.start), min(there.stop, here.stop))
                if rows:
                    both.append((name, rows, there))
            return both

        def outgoing(rank: int) -> list[Tensor]:
            found = []
            for number in sorted(held):
                header, image = held[number]
                for name, rows, there in shared(number, rank):
                    at, size = header.entries[name].start, division.row_bytes(name)
                    start, end = (at + (row - there.start) * size for row in (rows.start, rows.stop))
                    found.append(torch.frombuffer(image[start:end], dtype=torch.uint8) if size else _NO_BYTES)
            return found

        def incoming(rank: int) -> list[Tensor]:
            found = []
            for number in sorted(n for n, holder in holders.items() if holder == rank):
                for name, rows, _ in shared(number, me):
                    size, first = division.row_bytes(name), self._rows(name, me).start
                    data = self._own[name].reshape(-1).view(torch.uint8)
                    found.append(data[(rows.start - first) * size : (rows.stop - first) * size])
            return found

        self._groups.exchange(outgoing, incoming)

    def read(self) -> Read:
        tensors = dict[str, Tensor]()
        for name, own in self._own.items():
            if name in self._like:
                tensors[name] = of_rows(own, self._like[name], self.division.shapes[name])
            elif name in self._strides:
                strided = torch.empty_strided(own.shape, self._strides[name], dtype=own.dtype)
                tensors[name] = strided.copy_(own)
            else:
                tensors[name] = own
        for name, first in self.division.ties.items():
            tensors[name] = tensors[first]
        return dict(sorted(tensors.items())), uncut(self.document)


def _first_problem(groups: ProcessGroups, problem: str) -> str:
    return next(filter(None, groups.all_gather(problem)), "")


def _head_of_first(groups: ProcessGroups, holder: int, held: _Held | None) -> Header:
    """The header of the first part, on every rank."""
    head = _NO_BYTES
    image_bytes = 0
    if held is not None:
        (length,) = safetensors_header.LENGTH.unpack_from(held[1])
        head = torch.frombuffer(held[1][: safetensors_header.LENGTH.size + length], dtype=torch.uint8)
        image_bytes = len(held[1])
    head_bytes, image_bytes = groups.all_gather([len(head), image_bytes])[holder]
    received = torch.empty(head_bytes, dtype=torch.uint8)
    groups.exchange(lambda _: [head], lambda rank: [received] if rank == holder else [])
    return safetensors_header.parse(received.numpy().data, image_bytes)
