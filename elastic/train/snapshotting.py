"""After a step that is to be kept, its state lies whole in memory that outlives this process, before the step is reported as done.

One worker of a node, its local rank 0, writes for all. From a GPU the copy goes on beside the next step, and is whole before that one is reported as done. It does not make a state durable: the uploader takes checkpoints from the same memory.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from elastic.snapshot import image
from elastic.snapshot.copy_to_slot import SlotCopy
from elastic.snapshot.slots import ABOUT_LIMIT_BYTES, Snapshot, SnapshotSlots
from elastic.system.clock import Clock
from elastic.system.control_page import ControlPage
from elastic.train.state import FlatState

# What a state may grow by (a longer history in some state_dict) before other memory is needed.
SLACK = 1.05
SLACK_BYTES = 1 << 20
PATIENCE_S = 30.0
FIRST_PATIENCE_S = 5.0
LOOK_S = 0.002

Lend = Callable[[int], SnapshotSlots | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A place in the run whose state is kept; `chain` is that of all steps up to it, `line` its line of the metrics."""

    step: int
    epoch: int
    chain: str
    line: dict[str, Any]


class AgentSlots:
    """The area that this node's agent made, or makes when it is asked through the control page."""

    def __init__(self, page: ControlPage, agent_pid: int) -> None:
        self._page = page
        self._agent_pid = agent_pid
        self._fd: int | None = None
        self._area: SnapshotSlots | None = None

    def lend(self, size_bytes: int) -> SnapshotSlots | None:
        """An area whose slots hold `size_bytes`; None until there is one."""
        fd = self._page.slots_fd
        if fd is not None and fd != self._fd:
            self._area, self._fd = SnapshotSlots.open(f"/proc/{self._agent_pid}/fd/{fd}"), fd
        if self._area is not None and self._area.capacity_bytes >= size_bytes:
            return self._area
        self._page.wanted_bytes = with_slack(size_bytes)
        return None


class OwnSlots:
    """Without an agent the process itself holds one slot, from which checkpoints are taken; nothing survives it."""

    def __init__(self) -> None:
        self._area: SnapshotSlots | None = None

    def lend(self, size_bytes: int) -> SnapshotSlots | None:
        if self._area is None or self._area.capacity_bytes < size_bytes:
            self._area = SnapshotSlots.create(with_slack(size_bytes), 1)
        return self._area


def with_slack(size_bytes: int) -> int:
    return int(size_bytes * SLACK) + SLACK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSnapshot:
    """A snapshot, and the area that it lies in."""

    area: SnapshotSlots
    snapshot: Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    area: SnapshotSlots
    slot: int
    size_bytes: int
    point: StepRecord


class Snapshotting:
    def __init__(self, lend: Lend, transfer: SlotCopy, clock: Clock, facts: dict[str, Any]) -> None:
        """facts: what is kept beside each state: generation, world_size, torch."""
        self._lend = lend
        self._transfer = transfer
        self._clock = clock
        self._facts = facts
        self._asked = False
        self._under_way: _UnderWay | None = None
        self.cost_s = 0.0  # of the last one

    def start(
        self,
        parts: FlatState,
        point: StepRecord,
        *,
        late: Collection[int],
        patient: bool = False,
        halfway: Callable[[], None] | None = None,
    ) -> bool:
        """Begin to keep this state; False when there is no memory for it, or every slot is in use, now or (patient) for half a minute.

        late: addresses of the tensors that nothing changes before the next update. halfway: called with half of the tensors in the slot, where a fault can be injected.
        """
        assert self._under_way is None, "the one before is finished first"
        document = {"state": parts.document, "step": point.step, "epoch": point.epoch, "chain": point.chain}
        began_at = self._clock.monotonic()
        layout = image.layout(parts.tensors, document)
        laid_out_s = self._clock.monotonic() - began_at
        place = self._place(layout.size_bytes, patient=patient)
        if place is None:
            return False
        area, slot = place
        if halfway is not None:
            half = replace(layout, places=layout.places[: len(layout.places) // 2])
            self._transfer.start(half, area.body(slot), ())
            self._transfer.wait()
            halfway()
        began_at = self._clock.monotonic()
        self._transfer.start(layout, area.body(slot), late)
        self._under_way = _UnderWay(area=area, slot=slot, size_bytes=layout.size_bytes, point=point)
        self.cost_s = laid_out_s + self._clock.monotonic() - began_at
        return True

    def finish(self) -> PublishedSnapshot | None:
        """Wait for the copy that was begun, and publish it, before the next step is reported as done; None when none is under way, or the state changed under it."""
        if self._under_way is None:
            return None
        began_at = self._clock.monotonic()
        it, self._under_way = self._under_way, None
        found = self._transfer.wait()
        if found is None:
            print(
                f"the snapshot of step {it.point.step} is thrown away: parameters were changed before the next step's sum"
            )
            return None
        about = self._facts | {
            "step": it.point.step,
            "epoch": it.point.epoch,
            "chain": it.point.chain,
            "checksum": found,
        }
        snapshot = it.area.publish(it.slot, size_bytes=it.size_bytes, about=_with_line(about, it.point.line))
        self.cost_s += self._clock.monotonic() - began_at
        return PublishedSnapshot(area=it.area, snapshot=snapshot)

    def before_forward(self) -> None:
        self._transfer.before_forward()

    def before_update(self) -> None:
        self._transfer.before_update()

    def _place(self, size_bytes: int, *, patient: bool) -> tuple[SnapshotSlots, int] | None:
        # The very first snapshot of a process waits for the agent to make the memory; later ones are taken when it is there.
        patience_s = PATIENCE_S if patient else 0.0 if self._asked else FIRST_PATIENCE_S
        self._asked = True
        deadline = self._clock.monotonic() + patience_s
        while True:
            area = self._lend(size_bytes)
            slot = None if area is None else area.begin()
            if area is not None and slot is not None:
                return area, slot
            if self._clock.monotonic() >= deadline:
                return None
            self._clock.sleep(LOOK_S)


def _with_line(about: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """With the step's line of the metrics, unless the recipe logs so much that it does not fit."""
    whole = about | {"line": line}
    return whole if len(repr(whole)) * 2 < ABOUT_LIMIT_BYTES else about
