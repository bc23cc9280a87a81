"""A recipe holds one run, the same under `elastic-train`, torchrun and plain python.

It gives the recipe its device, its data in order, its steps, and places for what it prints and
writes. It does not decide when to stop or what to save: the loop does.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import default_collate

from elastic.config.durations import Every
from elastic.config.environment import AgentLink, CheckRequest
from elastic.config.identity import Identity
from elastic.config.run_dir import RunDir
from elastic.data import random_streams
from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail
from elastic.errors import UsageError
from elastic.events import RunFinished
from elastic.faults.inject import FaultInjector, WorkerFaults
from elastic.observe.log import EventLog
from elastic.observe.logged_event import RecipeEvent
from elastic.observe.metrics import Metrics
from elastic.snapshot.copy_to_slot import DeviceCopy, HostCopy
from elastic.snapshot.slots import SnapshotSlots
from elastic.storage.remote import open_store
from elastic.system.clock import SystemClock
from elastic.system.control_page import ControlPage
from elastic.train.checkpointing import Checkpointing
from elastic.train.loop import Loop, Rank0Output
from elastic.train.process_groups import ProcessGroups
from elastic.train.restore import LocalSnapshot, Restorer
from elastic.train.schedule import SnapshotSchedule
from elastic.train.snapshotting import AgentSlots, OwnSlots, Snapshotting
from elastic.train.state import State
from elastic.train.step import Step
from elastic.train.trace import StateTrace
from elastic.uploader.client import UploaderClient
from elastic.worker.heartbeat import HeartbeatSender


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A dataset in the run's order; made by `Run.data`."""

    loader: Loader

    @property
    def steps_per_epoch(self) -> int:
        return self.loader.order.steps_per_epoch

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.loader.order.steps


class Run:
    """Made by `elastic.start`.

    `device` is this worker's; `rank`, `world_size` and `is_first` (whether this is rank 0) are
    those of the current generation.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        link: AgentLink,
        ours: Identity,
        log: EventLog,
        check: CheckRequest | None,
    ) -> None:
        self.device = groups.device
        self.rank = groups.rank
        self.world_size = groups.world_size
        self.is_first = groups.rank == 0
        self._link = link
        self._identity = ours
        self._log = log
        self._check = check
        self._dir = RunDir.parse(link.run_dir)
        self._page = ControlPage.open(link.control_page)
        self._heartbeat = HeartbeatSender(self._page, groups.local_rank)
        self._groups = replace(groups, waiting=self._heartbeat.waiting)
        # A scheduler may ask a worker directly to stop, when it signals every process of a job.
        signal.signal(signal.SIGTERM, self._request_drain)

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

        epochs: passes over the data. tail: what becomes of the samples that do not fill a global
        batch, `drop` (left out of this epoch) or `pad` (filled up from the epoch's first samples).
        workers: data-loading processes of each rank, 0 to load in this one. collate: list of
        samples → batch, torch's default_collate where it is None. Raises UsageError for an unknown
        tail, and when the run would have no step (with `drop`: fewer samples than a global batch).
        """
        if tail not in (Tail.DROP.value, Tail.PAD.value):
            raise UsageError(f"expected tail='drop' or 'pad', found {tail!r}")
        order = SampleOrder(
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
        loader = Loader(
            dataset=dataset,
            order=order,
            device=self.device,
            workers=workers,
            collate=collate or default_collate,
        )
        return Data(loader=loader)

    def steps(self, data: Data, state: State) -> Iterator[Step]:
        """The steps of the run that are not done yet.

        It resumes by itself. It ends after the last step or, by SystemExit, at a drain. Raises
        NothingLoads, StatesDiffer, PeerLost or StoreFailed; none of them is for a recipe to catch.
        """
        # It connects at the first offer, which is rank 0's.
        with closing(UploaderClient(self._link.uploader)) as uploader:
            loop = self._loop(uploader, data.loader, state)
            yield from loop.run()
        if self.is_first and self._is_alone:
            # With an agent, the agent records it once the recipe has ended well.
            order = data.loader.order
            self._log.record(RunFinished(steps=order.steps, epochs=order.epochs, digest=loop.digest))
        random_streams.enter(self._identity.seed, "after")

    def mean(self, value: float) -> float:
        """The mean of a number over ranks, the same on every rank.

        For metrics, and not for anything that reaches the state: it depends on the world size.
        """
        values = self._groups.all_gather(float(value))
        return float(sum(values) / len(values))

    def print(self, *words: object) -> None:
        """print, on rank 0 only."""
        if self.is_first:
            print(*words, flush=True)

    def event(self, name: str, **fields: Any) -> None:
        """Add an event of the recipe's own to the run's events, from rank 0; fields are JSON."""
        if self.is_first:
            self._log.record(RecipeEvent(own_name=name, values=fields))

    def path(self, name: str) -> Path:
        """Where a file of the recipe's own belongs in the run directory.

        If the run directory is a URL, in its local part.
        """
        path = self._dir.local / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _loop(self, uploader: UploaderClient, loader: Loader, state: State) -> Loop:
        clock, link, is_first_of_node = SystemClock(), self._link, self._groups.local_rank == 0
        faults = None
        if link.faults:
            injector = FaultInjector(link.faults, self._dir.faults, self._log, clock)
            faults = WorkerFaults(injector, rank=self.rank, generation=link.generation)
        restorer = Restorer(
            groups=self._groups,
            store=open_store(self._dir.checkpoints_url),
            local=LocalSnapshot(SnapshotSlots.open(link.memory) if link.memory else None),
            run_id=self._identity.run_id,
            failures=link.failures,
            log=self._log if self.is_first else None,
            clock=clock,
            faults=faults,
        )
        output = Rank0Output(
            log=self._log,
            checkpointing=Checkpointing(uploader, Every.parse(link.save_every), clock),
            schedule=SnapshotSchedule(Every.parse(link.snapshot_every)),
        )
        # Nodes that share no folder keep a copy each: rank 0's node may be lost with its lines.
        keeps_metrics = self.is_first or (self._dir.is_remote and is_first_of_node)
        # One worker of a node takes snapshots. Without an agent only rank 0 has memory for them.
        takes_snapshots = is_first_of_node and (self.is_first or not self._is_alone)
        slots = OwnSlots() if self._is_alone else AgentSlots(self._page, link.pid)
        copy = HostCopy if self.device.type == "cpu" else partial(DeviceCopy, self.device)
        trace = None
        if self._check is not None:
            trace = StateTrace(self._check, writes=self.is_first, agent_pid=link.pid, clock=clock)
        return Loop(
            loader=loader,
            state=state,
            groups=self._groups,
            generation=link.generation,
            clock=clock,
            page=self._page,
            heartbeat=self._heartbeat,
            restorer=restorer,
            output=output if self.is_first else None,
            metrics=Metrics(self._dir.metrics_of(link.node)) if keeps_metrics else None,
            snapshotting=Snapshotting(slots.of_size, copy(), clock) if takes_snapshots else None,
            faults=faults,
            commits_drains=self._is_alone,
            trace=trace,
        )

    @property
    def _is_alone(self) -> bool:
        """There is no agent: this process wrote its own link."""
        return self._link.pid == os.getpid()

    def _request_drain(self, _signal: int, _frame: object) -> None:
        self._page.drain = True
