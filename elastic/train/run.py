"""What a recipe holds: one run, the same under `elastic-train`, torchrun and plain python, on however many workers there are.

It gives a recipe its device, its data in order, its steps, and a place for what it prints and writes. It does not decide when to stop or what to
save: the loop does.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from elastic.config.durations import Every
from elastic.config.environment import AgentLink
from elastic.config.identity import Identity
from elastic.config.run_dir import RunDir
from elastic.data import random_streams
from elastic.data.loader import Loader
from elastic.data.order import Order, Tail
from elastic.errors import UsageError
from elastic.events import RunFinished
from elastic.faults.inject import WorkerFaults
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
from elastic.snapshot.copy_to_slot import DeviceCopy, HostCopy
from elastic.snapshot.slots import SnapshotSlots
from elastic.storage.remote import open_store
from elastic.system.clock import Clock, SystemClock
from elastic.system.control_page import ControlPage
from elastic.train.checkpointing import Checkpointing
from elastic.train.loop import Loop, LoopParts, Rank0Output
from elastic.train.process_groups import ProcessGroups
from elastic.train.restore import LocalSnapshot
from elastic.train.snapshot_policy import SnapshotSchedule
from elastic.train.snapshotting import AgentSlots, OwnSlots, Snapshotting
from elastic.train.state import State
from elastic.train.step import Step
from elastic.uploader.client import UploaderClient
from elastic.worker.heartbeat import HeartbeatSender


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A dataset in the run's order; made by `Run.data`."""

    order: Order
    loader: Loader

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.order.steps


class Run:
    """Made by `elastic.start`. `device` is this worker's; `rank`, `world_size` and `is_first` describe the current generation."""

    def __init__(self, world: ProcessGroups, link: AgentLink, ours: Identity, log: EventLog) -> None:
        self.device = world.device
        self.rank = world.rank
        self.world_size = world.size
        self.is_first = world.rank == 0
        self._link = link
        self._identity = ours
        self._log = log
        self._dir = RunDir.parse(link.run_dir)
        self._page = ControlPage.open(link.control_page)
        self._pulse = HeartbeatSender(self._page, world.local_rank)
        self._world = replace(world, waiting=self._pulse.waiting)
        # A drain may be asked of a worker directly, by a scheduler that signals every process.
        signal.signal(signal.SIGTERM, self._asked_to_stop)

    def data(
        self,
        dataset: Any,
        *,
        epochs: int,
        tail: str = "drop",
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Data:
        """A map-style dataset (with __len__ and __getitem__) in the run's order.

        epochs: passes over the data. tail: what becomes of the samples that do not fill a global batch, `drop` (left out of this epoch) or `pad`
        (filled up from the epoch's first samples). workers: data-loading processes of each rank, 0 to load in this one. collate: list of
        samples → batch, torch's default_collate where it is None.
        Raises UsageError when there are fewer samples than one global batch, or for an unknown tail.
        """
        if tail not in (Tail.DROP.value, Tail.PAD.value):
            raise UsageError(f"expected tail='drop' or 'pad', found {tail!r}")
        order = Order(
            seed=self._identity.seed,
            samples=len(dataset),
            global_batch=self._identity.global_batch,
            shards=self._identity.shards,
            epochs=epochs,
            tail=Tail(tail),
        )
        if order.steps < 1:
            raise UsageError(
                f"expected at least one epoch of at least one global batch, found {epochs} epochs of {len(dataset)} samples "
                f"and a global batch of {order.global_batch}; take a smaller global batch, more data or tail='pad'"
            )
        return Data(order=order, loader=Loader(dataset, order, workers=workers, collate=collate))

    def steps(self, data: Data, state: State) -> Iterator[Step]:
        """The steps of the run that are not done yet; resumes by itself, ends after the last step or, by SystemExit, at a drain.

        Raises NothingLoads, StatesDiffer, PeerLost or StoreFailed; none of them is for a recipe to catch.
        """
        with ExitStack() as stack:
            around = self._surroundings(stack)
            loop = Loop(around, data.order, data.loader, state)
            yield from loop.run()
        if self.is_first and self._is_alone:
            # There is no agent to say so once the recipe has ended well.
            order = data.order
            self._log.record(RunFinished(steps=order.steps, epochs=order.epochs, digest=loop.digest))
        random_streams.enter(self._identity.seed, "after")

    def mean(self, value: float) -> float:
        """The mean of a number over ranks, the same on every rank; for metrics, not for anything that reaches the state."""
        values = self._world.gather(float(value))
        return float(sum(values) / len(values))

    def print(self, *words: object) -> None:
        """print, on the first rank only."""
        if self.is_first:
            print(*words, flush=True)

    def event(self, name: str, **fields: Any) -> None:
        """Add a record of the recipe's own to the run's events, from the first rank; fields must be JSON."""
        if self.is_first:
            self._log.record_named(name, fields)

    def path(self, name: str) -> Path:
        """Where a file of the recipe's own belongs in the run directory (its local part, when the run directory is a URL)."""
        path = self._dir.local / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _surroundings(self, stack: ExitStack) -> LoopParts:
        clock = SystemClock()
        diary = None
        if self.is_first:
            uploads = UploaderClient(self._link.uploader)
            stack.callback(uploads.close)
            diary = Rank0Output(
                log=self._log,
                metrics=self._metrics,
                saving=Checkpointing(uploads, Every.parse(self._link.save_every), clock),
                interval=SnapshotSchedule(Every.parse(self._link.snapshot_every)),
            )
        return LoopParts(
            world=self._world,
            run_id=self._identity.run_id,
            store=open_store(self._dir.checkpoints_url),
            clock=clock,
            generation=self._link.generation,
            failures=self._link.failures,
            commits_drains=self._is_alone,
            diary=diary,
            copy=self._copy(),
            page=self._page,
            pulse=self._pulse,
            kept=LocalSnapshot(SnapshotSlots.open(self._link.memory) if self._link.memory else None),
            snapshots=self._snapshots(clock),
            faults=WorkerFaults.of(
                self._link.faults,
                self._dir.faults,
                self._log,
                clock,
                rank=self.rank,
                generation=self._link.generation,
            ),
        )

    def _copy(self) -> Metrics | None:
        """Where nothing is shared, each node keeps the lines: the one of rank 0 may be lost with what it has not carried."""
        has_own = self._dir.is_remote and not self.is_first and self._world.local_rank == 0
        return self._metrics if has_own else None

    @property
    def _metrics(self) -> Metrics:
        return Metrics(self._dir.metrics_of(self._link.node))

    @property
    def _is_alone(self) -> bool:
        """There is no agent: this process wrote its own link."""
        return self._link.pid == os.getpid()

    def _snapshots(self, clock: Clock) -> Snapshotting | None:
        """One writer for each node's memory; without an agent only rank 0 has any."""
        if self._world.local_rank != 0 or (self._is_alone and not self.is_first):
            return None
        facts = {
            "generation": self._link.generation,
            "world_size": self.world_size,
            "torch": torch.__version__,
        }
        lend = OwnSlots().lend if self._is_alone else AgentSlots(self._page, self._link.pid).lend
        transfer = HostCopy() if self.device.type == "cpu" else DeviceCopy(self.device)
        return Snapshotting(lend, transfer, clock, facts)

    def _asked_to_stop(self, _signal: int, _frame: object) -> None:
        self._page.drain = True
