"""What one rank's loop is made of, for the modules that share the work of a step.

The parts stay the same for the whole generation; build_loop.py puts them together.
"""

from dataclasses import dataclass, field
from pathlib import Path

from elastic.config.durations import Every
from elastic.data.loader import Loader
from elastic.divergence import Divergence
from elastic.faults.inject import WorkerFaults
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
from elastic.proof.consistency import Comparison
from elastic.proof.step_again import StepAgain
from elastic.proof.trace import StateTrace
from elastic.storage.store import Store
from elastic.system.clock import Clock
from elastic.system.control_page import ControlPage
from elastic.train.groups import ProcessGroups
from elastic.train.loop.audit_schedule import AuditSchedule
from elastic.train.loop.on_step import StepFunctions
from elastic.train.loop.rehearsals import Rehearsals
from elastic.train.loop.schedule import ComparisonSchedule, EvaluatedSteps, SnapshotSchedule
from elastic.train.state.restore import Restorer
from elastic.train.state.snapshotting import Snapshotting
from elastic.train.state.state import State
from elastic.uploader.client import UploaderClient
from elastic.worker.heartbeat import HeartbeatSender


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank0Output:
    """What rank 0 alone writes, and decides for all ranks.

    store: of the run directory. events: the folder of all that nodes with a shared folder record.
    """

    store: Store
    events: Path
    log: EventLog
    uploader: UploaderClient
    save_every: Every
    schedule: SnapshotSchedule
    audits: AuditSchedule
    comparing: ComparisonSchedule
    evaluated: EvaluatedSteps = field(default_factory=EvaluatedSteps)
    rehearsals: Rehearsals | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """The parts of one rank in one generation.

    redo: because of what the first steps are done again, if this node knows of it. output: on rank
    0 alone. metrics: on rank 0, and where nodes share no folder a copy on each other node.
    snapshotting: on one worker of each node. faults: None without a plan. commits_drains: this
    process commits a drained state itself, since it has no agent. trace: where `elastic-train
    check` tries the recipe, else None. is_balanced: slow ranks may get fewer shards, if all ranks
    have it so. recipe_sha256: of the recipe's text, as this process runs it. step_functions: of
    run.on_step.
    """

    loader: Loader
    state: State
    groups: ProcessGroups
    node: str
    generation: int
    run_id: str
    redo: Divergence | None
    clock: Clock
    page: ControlPage
    heartbeat: HeartbeatSender
    restorer: Restorer
    comparison: Comparison
    output: Rank0Output | None
    metrics: Metrics | None
    snapshotting: Snapshotting | None
    faults: WorkerFaults | None
    commits_drains: bool
    trace: StateTrace | None
    is_balanced: bool
    recipe_sha256: str
    step_functions: StepFunctions
    again: StepAgain
