"""Everything noteworthy that can happen to a run is an event, a frozen record.

The log adds `time` (seconds since 1970), `node` and `generation` to each event and writes it as one
JSON line. Report, status and tests read these lines and the metrics; the console, which also shows
the workers' output, parses no other text. Fields are added, with a default, and never renamed: old
runs stay readable.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, dataclass_transform

from elastic.system.untrusted import parse_number


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """Each subclass is a frozen dataclass of keyword arguments, as this one."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    @property
    def name(self) -> str:
        """The event's name in the log: generation_started for GenerationStarted."""
        return _snake(type(self).__name__)

    def fields(self) -> dict[str, Any]:
        return asdict(self)


class RunStarted(Event):
    """Rank 0 begins to train: once in each generation, despite the name.

    `steps` is the last step of the run; `epochs` counts the last one too where the run ends within
    it. steps_per_epoch: None where epochs have different lengths, or another version wrote it.
    """

    steps: int
    epochs: int
    seed: int
    global_batch: int
    shards: int
    steps_per_epoch: int | None = None

    def epochs_done(self, step: int) -> int:
        """How many are complete after a step; an estimate where they have different lengths."""
        if self.steps_per_epoch:
            return step // self.steps_per_epoch
        return step * self.epochs // self.steps if self.steps else 0


class NodeScheduled(Event):
    """A scheduler started this agent; written by each agent at its start, in generation 0.

    `scheduler`: slurm. `job`: Slurm's number of the job; each task of an array has its own.
    `array_job` and `array_task`: None outside an array. `restarts`: how often the job was requeued;
    None where the scheduler's variable is no number. `host`: the scheduler's name of the machine.
    """

    scheduler: str
    job: str
    array_job: str | None = None
    array_task: int | None = None
    restarts: int | None = 0
    host: str = ""

    @staticmethod
    def by_slurm(variables: Mapping[str, str]) -> "NodeScheduled | None":
        """The job that started a process with this environment; None outside Slurm."""
        if not (job := variables.get("SLURM_JOB_ID")):
            return None
        return NodeScheduled(
            scheduler="slurm",
            job=job,
            array_job=variables.get("SLURM_ARRAY_JOB_ID"),
            array_task=parse_number(variables.get("SLURM_ARRAY_TASK_ID", "")),
            # Slurm sets it from the first requeue on.
            restarts=parse_number(variables.get("SLURM_RESTART_COUNT", "0")),
            host=variables.get("SLURMD_NODENAME", ""),
        )


class GenerationStarted(Event):
    """Written by the agent of rank 0.

    `cause`: start, resume, failure, node lost, node joined or node left. `plain`: the script does
    not import this library, so that no event tells of its steps and states.
    """

    world_size: int
    nodes: list[str]
    cause: str
    restarts: int  # consecutive restarts without a new step
    plain: bool = False


class GenerationEnded(Event):
    """Written by each agent; `step` is the last step that its own workers finished."""

    cause: str
    step: int


class WorkerStarted(Event):
    """`standby`: it had run the script already, and waited for its assignment."""

    rank: int
    pid: int
    standby: bool = False


class StandbyWaits(Event):
    """A process has run the script up to where it needs its rank; `seconds`: since it began."""

    pid: int
    seconds: float


class StandbyEnded(Event):
    """A standby ended before it had an assignment. The run goes on without it."""

    pid: int
    reason: str


class WorkerExited(Event):
    """`code` is None when `signal` is set.

    `victim`: the agent killed it, or its collective failed, because another worker failed first.
    """

    rank: int
    pid: int
    code: int | None
    signal: str | None
    victim: bool


class WorkerFailed(Event):
    """The exception that ended a worker, as the worker itself reported it."""

    rank: int
    message: str
    traceback: str


class HangDetected(Event):
    """An agent finds that one of its workers hangs.

    The stacks of all its threads follow in the worker's log, and then the agent kills it.

    `place`: the phase of the worker: start, step, wait, between, save or after. `silence_s`:
    seconds without progress; `limit_s`: the seconds that this phase may take.
    """

    rank: int
    place: str
    silence_s: float
    limit_s: float
    reason: str


class DrainRequested(Event):
    reason: str


class Drained(Event):
    """All ranks stopped after the same step.

    `committed`: a checkpoint holds that step. Otherwise the agents hold it in memory, and commit it
    if the run ends here.
    """

    step: int
    committed: bool


class Restored(Event):
    """Written by rank 0; `lost_steps` are the steps that are done a second time.

    `source`: snapshot (every node had the state in memory), peer (some nodes received it from
    another node's memory), checkpoint, or none (the run starts from its seed). last_step_s: when
    the newest step ended that was there, in seconds since 1970: its line may be lost by now.
    """

    step: int
    source: str
    lost_steps: int
    seconds: float
    last_step_s: float | None = None


class SettingsIgnored(Event):
    """The recipe builds objects with other settings than when the state of `step` was saved.

    Those that were saved are in force. `settings`: each with its place and both values.
    """

    step: int
    settings: list[str]


class RecipeEdited(Event):
    """The process that goes on after `step` runs another text of the recipe than before."""

    step: int


class LoggedByRank(Event):
    """By `step` ranks have logged other numbers under these names; the metrics have rank 0's."""

    step: int
    names: list[str]


class Stopped(Event):
    """The recipe ended the run after `step`, of the `steps` that it would have had."""

    step: int
    reason: str
    steps: int = 0


class OnStepFailed(Event):
    """A function of `run.on_step` raised; written by rank 0, once for each function and process."""

    step: int
    function: str
    message: str


class FirstStep(Event):
    """Rank 0 finished a step that no generation had finished before, the first of its own."""

    step: int


class CheckpointCommitted(Event):
    step: int
    size_bytes: int
    seconds: float
    digest: str


class CheckpointFailed(Event):
    step: int
    reason: str


class CheckpointFenced(Event):
    """A save was dropped because a newer generation exists without this node."""

    step: int
    reason: str


class CheckpointDiffers(Event):
    """A step was committed before with another state than the one to save; the run stops."""

    step: int
    reason: str


class UploaderDied(Event):
    """A node's uploader ended, or could not be started; nothing is saved until the next runs."""

    reason: str


class CheckpointRejected(Event):
    """A committed checkpoint does not load; it stays where it is, and an older one is used."""

    step: int
    reason: str


class SnapshotInterval(Event):
    """`--snapshot-every auto` takes a snapshot every `every` steps from now on.

    `cost_s` and `step_s` are medians: seconds that a snapshot costs, and that a step takes.
    """

    every: int
    cost_s: float
    step_s: float


class SnapshotRejected(Event):
    """A snapshot is not used: nodes hold different ones, or it was damaged."""

    step: int
    reason: str


class ShardsMoved(Event):
    """From this step on slow ranks compute fewer shards (`--balance`); written by rank 0.

    `shards`, `before`: how many each rank has, by rank. A new generation begins with equal numbers.
    """

    step: int
    shards: list[int]
    before: list[int]


class AuditFailed(Event):
    """A shard that was computed twice in this step gave different bits; written by rank 0.

    `ranks`: the shard's own rank, and its auditor. `entry`: the first thing that
    differs. `verdict`: machine or recipe. `culprit`: the node of that machine.
    """

    step: int
    shard: int
    ranks: list[int]
    entry: str = ""
    verdict: str = ""
    culprit: str | None = None


class DivergenceDetected(Event):
    """The ranks' states differ after this step; written by rank 0.

    `entry`: the first entry of the state that differs; empty if none was found. `ranks`: those that
    have the same state together.
    """

    step: int
    entry: str
    ranks: list[list[int]]


class DivergenceJudged(Event):
    """Whose fault a difference was, once the steps were done again; written by rank 0.

    `verdict`: machine (the ranks agreed then; the run goes on) or recipe (they differed again; the
    run has failed). `nodes`: those that were wrong; where one of several must have been, all these.
    """

    step: int
    entry: str
    nodes: list[str]
    verdict: str


class Rehearsed(Event):
    """All workers were started anew on purpose, and did a step again; written by rank 0.

    seconds: from the end of the step to that of the step done again. verdict: alike, or once where
    one of three computations differed. not_restored: variables of the recipe that had other values
    at the end of the step, with both. recipe: a checksum of its text and arguments.
    """

    step: int
    seconds: float
    verdict: str
    not_restored: dict[str, str] = field(default_factory=dict)
    recipe: str = ""


class Overlapped(Event):
    """A changed group did the last step of the one before again; fields as of Rehearsed."""

    step: int
    seconds: float
    verdict: str
    not_restored: dict[str, str] = field(default_factory=dict)
    recipe: str = ""


class StepDiffered(Event):
    """A step that a rehearsal or a changed group did again differs, and the run ends.

    entries: the differing names, the first nearest to the cause. verdict: hidden or
    random. accepted: the run goes on (--accept). recipe: as in Rehearsed.
    """

    step: int
    entries: list[str]
    verdict: str
    accepted: bool = False
    recipe: str = ""


class ReplayDiffered(Event):
    """A step that was done again gave another result than the first time; written by rank 0.

    `restored`: the step from whose state it was done again. `loss_before`, `loss_now`: None for
    a value that is no finite number; where they are equal, the gradients differ. `excuse`: why the
    run goes on all the same; empty where it ends.
    """

    step: int
    restored: int = 0
    loss_before: float | None = None
    loss_now: float | None = None
    excuse: str = ""


class FaultInjected(Event):
    """A fault of the plan is about to happen; `fault` is its text.

    `step`: the step in training or being saved. For a fault of a node, the last step that its
    workers finished, 0 before the first. None during a restore.
    """

    fault: str
    step: int | None


class RunFinished(Event):
    """A plain script has 0 steps and no digest: all workers exited with code 0."""

    steps: int
    epochs: int
    digest: str


class RunFailed(Event):
    exit_code: int
    reason: str


class RunInterrupted(Event):
    """An agent was told to leave, or could not form a generation in time.

    `step` is that of the newest committed checkpoint. If that is the last step that was trained,
    the exit code is 75. reason: for a reader. gave_up: whether it waited in vain for
    others, and no request to leave had come.
    """

    step: int
    reason: str = ""
    gave_up: bool = False


# The last events of an agent: its node is gone then, however young its heartbeat. Where the run is
# complete, only the agent of rank 0 writes one.
GOODBYES = (RunInterrupted, RunFailed, RunFinished)
KINDS = {_snake(kind.__name__): kind for kind in Event.__subclasses__()}
