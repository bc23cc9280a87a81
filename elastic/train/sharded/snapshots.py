"""The snapshot of a sharded state has each rank's part in its own node's memory, and in another's.

The ranks of a node write into one slot, which the first of them publishes once all parts are there.
With two copies a rank sends its part to one of the next node, so that the death of any one node
leaves all parts. Without an agent only rank 0 has a slot, and all send their parts to it.

A part counts with all others of its step. The slots of all nodes are published before the sum of
the next step ends, and only then is an older one written over: one complete step is there unless a
node has room for one slot alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastic.snapshot.copy_to_slot import SlotCopy
from elastic.snapshot.slots import PAGE, SnapshotInfo, SnapshotPart, SnapshotSlots
from elastic.system.clock import Clock
from elastic.train.groups import ProcessGroups
from elastic.train.state.flat import FlatState
from elastic.train.state.snapshotting import PublishedSnapshot, SlotsFor, Snapshotting, layout_of, with_slack


@dataclass(frozen=True, slots=True)
class Place:
    """The part of rank `number` is written by `writer` into the slot that `leader` publishes.

    is_copy: another slot has it, too.
    """

    number: int
    writer: int
    leader: int
    is_copy: bool = False


def places_of(nodes: Sequence[Sequence[int]], copies: int) -> list[Place]:
    """nodes: the ranks of each. Those of one slot are in the order in which the parts lie."""
    own = [Place(rank, rank, ranks[0]) for ranks in nodes for rank in ranks]
    if copies < 2 or len(nodes) < 2:
        return own
    following = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    return own + [
        Place(rank, others[at % len(others)], others[0], is_copy=True)
        for ranks, others in following
        for at, rank in enumerate(ranks)
    ]


def starts_of(places: Sequence[Place], leader: int, sizes: Sequence[int]) -> list[tuple[Place, int]]:
    """The parts in the slot that `leader` publishes, and where each begins."""
    found, at = [], 0
    for place in places:
        if place.leader == leader:
            found.append((place, at))
            at += sizes[place.number] + -sizes[place.number] % PAGE
    return found


class PartSnapshotting(Snapshotting):
    """Those of one rank; every rank takes part in each."""

    def __init__(
        self,
        slots_for: SlotsFor,
        copy: SlotCopy,
        clock: Clock,
        groups: ProcessGroups,
        places: Sequence[Place],
    ) -> None:
        super().__init__(slots_for, copy, clock)
        self._groups, self._places = groups, places
        self._leaders = {each.leader for each in places}
        self._leader = next((each.leader for each in places if each.writer == groups.rank), None)
        self._opened: SnapshotSlots | None = None  # those of this rank's leader
        self._scratch = memoryview(b"")
        self._memory = list[Any]()  # how that one names them: a path, and their capacity

    def keeps(self, step: int, *, is_last: bool) -> bool:
        return self._groups.rank not in self._leaders or super().keeps(step, is_last=is_last)

    def take(
        self,
        state: FlatState,
        info: SnapshotInfo,
        *,
        wait: bool = True,
        patient: bool = False,
        before_publishing: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> PublishedSnapshot | None:
        """As `Snapshotting.take`; None, too, on a rank that publishes none."""
        del wait  # all ranks meet here, and go on together
        groups, me = self._groups, self._groups.rank
        began_s = self._clock.monotonic()
        layout = layout_of(state.part(me, groups.world_size), info)
        laid_out_s = self._clock.monotonic() - began_s
        sizes = groups.all_gather(layout.size_bytes)
        found = self._shared_slot(sizes, patient=patient, meanwhile=meanwhile)
        began_s = self._clock.monotonic()
        if not isinstance(found, tuple):
            return None
        slots, slot = found
        starts = [] if self._leader is None else starts_of(self._places, self._leader, sizes)
        body = memoryview(b"") if slots is None else slots.body(slot)
        written = {p.number: body[at : at + sizes[p.number]] for p, at in starts if p.writer == me}
        if me not in written and len(self._scratch) < layout.size_bytes:  # no slot of this rank's takes it
            self._scratch = memoryview(bytearray(with_slack(layout.size_bytes)))
        at = next((at for place, at in starts if place.number == place.writer == me), 0)
        self.copy.start(layout, body if me in written else self._scratch, at)
        own = written.get(me, self._scratch[: layout.size_bytes])
        checksum = self.copy.wait()
        if before_publishing is not None:
            before_publishing()
        goes_to = [each.writer for each in self._places if each.number == me != each.writer]
        groups.exchange(
            lambda rank: [_bytes(own)] if rank in goes_to else [],
            lambda rank: [_bytes(written[rank])] if rank in written and rank != me else [],
        )
        checksums = groups.all_gather(checksum)
        if me not in self._leaders or slots is None:
            return None
        parts = tuple(
            SnapshotPart(
                number=n, start=at, size_bytes=sizes[n], checksum=checksums[n], is_copy=place.is_copy
            )
            for place, at in starts
            for n in [place.number]
        )
        info = replace(info, of=groups.world_size, parts=parts)
        snapshot = slots.publish(slot, size_bytes=parts[-1].end, info=info)
        cost_s = laid_out_s + self._clock.monotonic() - began_s
        self._newest = PublishedSnapshot(slots=slots, snapshot=snapshot, cost_s=cost_s)
        self._mark_newest()
        return self._newest

    def _shared_slot(
        self, sizes: Sequence[int], *, patient: bool, meanwhile: Callable[[], None]
    ) -> tuple[SnapshotSlots | None, int] | None:
        """The slot in which this rank writes parts, if it does; None where a node has none."""
        groups, found = self._groups, None
        if groups.rank in self._leaders:
            last, at = starts_of(self._places, groups.rank, sizes)[-1]
            found = self._free_slot(at + sizes[last.number], patient=patient, meanwhile=meanwhile)
        mine: list[Any] = [] if found is None else [found[0].path, found[0].capacity_bytes, found[1]]
        told = groups.all_gather(mine)
        if not all(told[leader] for leader in self._leaders):
            return None
        if self._leader is None or found is not None:
            return found or (None, 0)
        *memory, slot = told[self._leader]
        if memory != self._memory:
            self._opened, self._memory = SnapshotSlots.open(memory[0]), memory
        return self._opened, slot


def _bytes(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
