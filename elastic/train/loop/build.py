"""The loop of a rank is put together here, from what its launcher and its recipe gave.

Which parts a rank has follows from its place: rank 0 writes and decides for all, and one worker of
each node takes snapshots.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elastic.checkpoint import stop_record
from elastic.checkpoint.stop_record import StopRecord
from elastic.config.durations import Every
from elastic.config.environment import AgentLink, CheckRequest
from elastic.config.identity import Identity
from elastic.config.run_dir import RunDir
from elastic.data.loader import Loader
from elastic.data.order import SampleOrder
from elastic.faults.inject import FaultInjector, WorkerFaults
from elastic.inherit.inherit import Inheritance
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
from elastic.proof.consistency import Comparison
from elastic.proof.step_again import StepAgain
from elastic.proof.trace import StateTrace
from elastic.snapshot.copy_to_slot import DeviceCopy, HostCopy
from elastic.snapshot.slots import SnapshotSlots
from elastic.storage.remote import open_store
from elastic.storage.store import Store
from elastic.system.clock import Clock, SystemClock
from elastic.system.control_page import ControlPage
from elastic.train.groups import ProcessGroups
from elastic.train.loop.audit_schedule import AuditSchedule
from elastic.train.loop.flip import flip
from elastic.train.loop.loop import Loop
from elastic.train.loop.on_step import StepFunctions
from elastic.train.loop.parts import LoopParts, Rank0Output
from elastic.train.loop.rehearsals import Rehearsals
from elastic.train.loop.schedule import ComparisonSchedule, SnapshotSchedule
from elastic.train.state.restore import LocalSnapshots, Restorer
from elastic.train.state.snapshotting import PROMPT_BYTES, AgentSlots, OwnSlots, Snapshotting
from elastic.train.state.state import State
from elastic.uploader.client import UploaderClient
from elastic.worker.heartbeat import HeartbeatSender


def is_alone(link: AgentLink) -> bool:
    """There is no agent: this process wrote its own link."""
    return link.pid == os.getpid()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopBuilder:
    """check: what `elastic-train check` asks of this command, None outside of a check."""

    groups: ProcessGroups
    link: AgentLink
    identity: Identity
    run_dir: RunDir
    page: ControlPage
    heartbeat: HeartbeatSender
    log: EventLog
    check: CheckRequest | None
    step_functions: StepFunctions

    def build(self, uploader: UploaderClient, loader: Loader, state: State) -> Loop:
        clock, link, groups = SystemClock(), self.link, self.groups
        store = open_store(self.run_dir.url)
        comparison = Comparison(
            groups=groups,
            node=link.node,
            generation=link.generation,
            log=self._log_of_rank0,
            redo=link.divergence,
        )
        faults = self._faults(state, clock)
        # Nodes that share no folder keep a copy each: rank 0's node may be lost with its lines.
        keeps_metrics = self._is_first or (self.run_dir.is_remote and groups.local_rank == 0)
        parts = LoopParts(
            loader=loader,
            state=state,
            groups=groups,
            node=link.node,
            generation=link.generation,
            run_id=self.identity.run_id,
            redo=link.divergence,
            clock=clock,
            page=self.page,
            heartbeat=self.heartbeat,
            restorer=self._restorer(comparison, store, faults, clock),
            comparison=comparison,
            output=self._output(uploader, store, loader.order, clock) if self._is_first else None,
            metrics=self._metrics() if keeps_metrics else None,
            snapshotting=self._snapshotting(state, clock),
            faults=faults,
            commits_drains=is_alone(link),
            trace=self._trace(clock),
            is_balanced=link.balance == "auto" and self.check is None and groups.device.type == "cpu",
            recipe_sha256=self.identity.recipe_sha256,
            step_functions=self.step_functions,
            again=StepAgain(
                path=Path(link.evidence) if link.evidence and self.check is None else None,
                groups=groups,
                clock=clock,
                generation=link.generation,
                log=self._log_of_rank0,
                events=self.run_dir.events,
                recipe=self._recipe,
                accepts=link.accepts,
            ),
        )
        return Loop(parts, self._read_stop(store, clock))

    @property
    def _is_first(self) -> bool:
        return self.groups.rank == 0

    @property
    def _log_of_rank0(self) -> EventLog | None:
        return self.log if self._is_first else None

    def _metrics(self) -> Metrics:
        run, link = self.run_dir, self.link
        generation = None if run.is_remote else link.generation
        return Metrics(run.metrics_of(link.node), generation=generation)

    def _faults(self, state: State, clock: Clock) -> WorkerFaults | None:
        if not self.link.faults:
            return None
        injector = FaultInjector(self.link.faults, self.run_dir.faults, self.log, clock)
        injector.flip = partial(flip, state)
        return WorkerFaults(injector, rank=self.groups.rank, generation=self.link.generation)

    def _restorer(
        self, comparison: Comparison, store: Store, faults: WorkerFaults | None, clock: Clock
    ) -> Restorer:
        link, parent = self.link, self.identity.parent
        return Restorer(
            groups=self.groups,
            store=open_store(self.run_dir.checkpoints_url),
            local=LocalSnapshots(SnapshotSlots.open(link.memory) if link.memory else None),
            run_id=self.identity.run_id,
            run_url=self.run_dir.url,
            comparison=comparison,
            failures=link.failures,
            committed_step=link.committed_step,
            divergence=link.divergence,
            log=self._log_of_rank0,
            clock=clock,
            faults=faults,
            inheritance=None if parent is None else Inheritance(parent=parent, run_store=store),
        )

    def _rehearsals(self, order: SampleOrder, clock: Clock) -> Rehearsals | None:
        every = Every.parse(self.link.rehearse)
        if every.kind == "off" or not self.link.evidence or self.check is not None:
            return None
        return Rehearsals(every, order, self.run_dir.events, self._recipe, clock)

    @property
    def _recipe(self) -> str:
        """What a rehearsal shows to be exact: the recipe's text with these arguments."""
        text = json.dumps([self.identity.recipe_sha256, *self.identity.arguments])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _output(
        self, uploader: UploaderClient, store: Store, order: SampleOrder, clock: Clock
    ) -> Rank0Output:
        return Rank0Output(
            store=store,
            events=self.run_dir.events,
            log=self.log,
            uploader=uploader,
            save_every=Every.parse(self.link.save_every),
            schedule=SnapshotSchedule(Every.parse(self.link.snapshot_every)),
            audits=AuditSchedule(Every.parse(self.link.audit)),
            comparing=ComparisonSchedule(),
            rehearsals=self._rehearsals(order, clock),
        )

    def _snapshotting(self, state: State, clock: Clock) -> Snapshotting | None:
        """For one worker of each node; without an agent only rank 0 has memory for snapshots."""
        alone, device = is_alone(self.link), self.groups.device
        if self.groups.local_rank != 0 or (alone and not self._is_first):
            return None
        slots = OwnSlots() if alone else AgentSlots(self.page, self.link.pid)
        copy = HostCopy() if device.type == "cpu" else DeviceCopy(device, state.updated_addresses)
        # Without an agent, no other process could make the memory ready.
        is_large = not alone and sum(p.nbytes for p in state.parameters()) > PROMPT_BYTES
        asks_first = is_large and self.page.slots_fd is None
        return Snapshotting(slots.of_size, copy, clock, asks_first=asks_first)

    def _trace(self, clock: Clock) -> StateTrace | None:
        if self.check is None:
            return None
        return StateTrace(self.check, writes=self._is_first, agent_pid=self.link.pid, clock=clock)

    def _read_stop(self, store: Store, clock: Clock) -> StopRecord | None:
        """Rank 0 reads it for all ranks."""
        found = stop_record.read(store, self.identity.run_id, clock) if self._is_first else None
        text = self.groups.from_rank0("" if found is None else found.to_json().decode())
        return stop_record.parse(text.encode()) if text else None
