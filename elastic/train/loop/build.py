"""The parts of a rank are put together in one place, from what its launcher and its recipe gave.

Which parts a rank has follows from its place: rank 0 writes and decides for all, and one worker of
each node takes snapshots. Where `elastic-train check` tries the recipe, it also has a StateTrace.
"""

import hashlib
import json
import os
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from elastic.checkpoint.stop_record import StopRecord
from elastic.config.environment import AgentLink, CheckRequest, Launch
from elastic.config.identity import Identity
from elastic.config.run_dir import RunDir
from elastic.data.loader import Loader
from elastic.faults.flip import flip, flip_bit
from elastic.faults.inject import FaultInjector, WorkerFaults
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
from elastic.observe.step_line import StepLine
from elastic.proof.agreement import Comparison
from elastic.proof.evidence import Evidence, TraceLine
from elastic.proof.rehearsals import Rehearsals
from elastic.proof.step_again import StepAgain
from elastic.snapshot.copy_to_slot import DeviceCopy, HostCopy
from elastic.storage.remote import open_store
from elastic.system.clock import Clock, SystemClock
from elastic.system.control_page import ControlPage
from elastic.train.groups import ProcessGroups
from elastic.train.loop.on_step import StepFunctions
from elastic.train.loop.schedule import COMPARISON_SHARE, AuditSchedule, Interval, SnapshotSchedule
from elastic.train.sharded.snapshots import PartSnapshotting, Place, places_of
from elastic.train.state.snapshotting import AgentSlots, OwnSlots, Snapshotting
from elastic.train.state.state import State
from elastic.worker.heartbeat import HeartbeatSender


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What a worker has from the recipe's elastic.start, whatever its assignment."""

    launch: Launch
    identity: Identity
    run_dir: RunDir
    device: torch.device
    backend: str | None
    step_functions: StepFunctions


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker has before its loop, as its launcher made it.

    check: what `elastic-train check` asks of this command, None outside of a check. stopped: where
    the recipe ended the run early, None where it did not.
    """

    groups: ProcessGroups
    link: AgentLink
    identity: Identity
    run_dir: RunDir
    page: ControlPage
    heartbeat: HeartbeatSender
    log: EventLog
    check: CheckRequest | None
    stopped: StopRecord | None
    step_functions: StepFunctions


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank0Output:
    """What rank 0 alone writes, and decides for all ranks.

    comparing: between comparisons of the ranks' states.
    """

    log: EventLog
    schedule: SnapshotSchedule
    audits: AuditSchedule
    rehearsals: Rehearsals | None
    comparing: Interval


class StateTrace:
    """For `elastic-train check`: what a step leaves behind is written down entry by entry.

    Rank 0 writes one line for each step of each generation: its evidence, and what the recipe
    logged. A run ends where the check has enough steps, or drains after the step that it names.
    """

    def __init__(self, request: CheckRequest, *, writes: bool, agent_pid: int, clock: Clock) -> None:
        """writes: on rank 0 alone, which also asks the agent to leave."""
        self._request = request
        self._path = Path(request.trace) if writes else None
        self._agent_pid = agent_pid
        self._clock = clock
        self._began_s = clock.monotonic()
        self._notes: list[str] = []

    def note(self, sentence: str) -> None:
        """What the run says on its console stands in the next line."""
        self._notes.append(sentence)

    def drains(self, step: int) -> bool:
        """Whether the node is to leave after this step, exactly as if it were told to."""
        if step != self._request.leave_at:
            return False
        if self._path is not None:
            os.kill(self._agent_pid, signal.SIGTERM)
        return True

    def add(self, line: StepLine, found: Evidence, *, steps: int, shards: int) -> None:
        """Write a step down. steps, shards: of the run."""
        if self._path is None:
            return
        written = TraceLine(
            step=line.step,
            generation=line.generation,
            world_size=line.world_size,
            steps=steps,
            shards=shards,
            entries=found.entries
            | {f"step.log({name}=...)": repr(value) for name, value in line.values.items()},
            epoch=line.epoch,
            notes=self._notes,
        )
        self._notes = []
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(written)) + "\n")

    def is_over(self, step: int) -> bool:
        """Whether the check needs no step after this one."""
        seconds = self._clock.monotonic() - self._began_s
        return step >= self._request.least_steps and seconds >= self._request.seconds


class LoopParts:
    """The parts of one rank in one generation.

    The loop gives the loader another order, where the run began in one, and opens fresh groups when
    it is left early. store, checkpoints: of the run directory, and of what is committed in it.
    commits_drains: without an agent the process itself commits the state with which it is told to
    end. hands_over: this rank gives snapshots to an uploader. output: on rank 0 alone. metrics: on
    rank 0, and where nodes share no folder a copy on each other node. trace: where
    `elastic-train check` tries the recipe, else None. stopped: where the recipe ended the run
    early, if it did.
    """

    def __init__(self, worker: WorkerParts, loader: Loader, state: State) -> None:
        self.loader, self.state, self.clock = loader, state, SystemClock()
        groups, link, run = worker.groups, worker.link, worker.run_dir
        options = link.options
        self.groups, self.link, self.identity, self.run_dir = groups, link, worker.identity, run
        self.page, self.heartbeat, self.step_functions = worker.page, worker.heartbeat, worker.step_functions
        self.commits_drains, self.log = is_alone(link), worker.log
        is_first, check = groups.rank == 0, worker.check
        self.hands_over = is_first
        log = worker.log if is_first else None
        evidence = link.evidence if check is None else ""
        self.store, self.checkpoints = open_store(run.url), open_store(run.checkpoints_url)
        self.comparison = Comparison(
            groups=groups, node=link.node, generation=link.generation, log=log, ended_by=link.divergence
        )
        again = self.again = StepAgain(
            path=Path(evidence) if evidence else None,
            groups=groups,
            clock=self.clock,
            generation=link.generation,
            log=log,
            events=run.events,
            recipe=_recipe(worker.identity),
            accepts=options.accept,
        )
        self.output: Rank0Output | None = None
        if is_first:
            rehearsals = None
            if options.rehearse.kind != "off" and evidence:
                rehearsals = Rehearsals(options.rehearse, loader.order, run.events, again.recipe, self.clock)
            self.output = Rank0Output(
                log=worker.log,
                schedule=SnapshotSchedule(options.snapshot_every),
                audits=AuditSchedule(options.audit),
                rehearsals=rehearsals,
                comparing=Interval(COMPARISON_SHARE),
            )
        self.metrics: Metrics | None = None
        # Nodes that share no folder keep a copy each: rank 0's node may be lost with its lines.
        if is_first or (run.is_remote and groups.local_rank == 0):
            path = run.metrics_of(link.node)
            self.metrics = Metrics(path, generation=link.generation, is_copy=run.is_remote)
        self.trace: StateTrace | None = None
        if check is not None:
            self.trace = StateTrace(check, writes=is_first, agent_pid=link.pid, clock=self.clock)
        self.snapshotting = _snapshotting(self)
        self.faults: WorkerFaults | None = None
        if options.faults:
            injector = FaultInjector(options.faults, run.faults, worker.log, self.clock)
            injector.flip = partial(_flip, state)
            self.faults = WorkerFaults(injector=injector, rank=groups.rank, generation=link.generation)
        self.stopped = worker.stopped


def is_alone(link: AgentLink) -> bool:
    """There is no agent: this process wrote its own link."""
    return link.pid == os.getpid()


def _recipe(identity: Identity) -> str:
    """What a rehearsal shows to be exact: the recipe's text with these arguments."""
    text = json.dumps([identity.recipe_sha256, *identity.arguments])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _snapshotting(parts: LoopParts) -> Snapshotting | None:
    """For one worker of each node, and of a sharded state for each; without an agent only rank 0
    has memory for snapshots.
    """
    groups, alone, sharded = parts.groups, parts.commits_drains, parts.state.sharded
    if (groups.local_rank != 0 or (alone and groups.rank != 0)) and sharded is None:
        return None
    slots = OwnSlots() if alone else AgentSlots(parts.page, parts.link.pid)
    device, addresses = groups.device, parts.state.updated_addresses
    copy = HostCopy() if device.type == "cpu" else DeviceCopy(device, addresses)
    if sharded is None:
        return Snapshotting(slots.of_size, copy, parts.clock)
    places = [Place(rank, 0, 0) for rank in range(groups.world_size)]
    if not alone:
        nodes = groups.all_gather(parts.link.node)
        ranks = [[rank for rank, node in enumerate(nodes) if node == each] for each in dict.fromkeys(nodes)]
        # Nodes may be started with other options.
        places = places_of(ranks, min(groups.all_gather(parts.link.options.snapshot_copies)))
    parts.hands_over = any(each.leader == groups.rank for each in places)
    return PartSnapshotting(slots.of_size, copy, parts.clock, groups, places)


def _flip(state: State, target: str) -> None:
    if target == "gradient" and state.sharded is not None:
        state.sharded.computation.spoil = flip_bit
    else:
        flip(partial(_tensors_of, state), target)


def _tensors_of(state: State, target: str) -> Iterable[Tensor]:
    """Those in which a fault plan flips a bit."""
    if target != "optimizer":
        return state.trained
    modules = [name for name, thing in state.objects.items() if isinstance(thing, nn.Module)]
    return (t for name, t in state.flatten().tensors.items() if name.split(".")[0] not in modules)
