"""What `report --json` and `status --json` print of a run: figures of its view, under names that
scripts rely on.
"""

from dataclasses import dataclass, fields

from elastic import events as kinds
from elastic.config.parent import Ancestor
from elastic.observe.recovery import Recovery
from elastic.observe.run_view import (
    AuditCounts,
    ComparedSteps,
    Divergence,
    PlainScript,
    RunView,
    ScheduledNode,
    StepTime,
    Worker,
)
from elastic.observe.slow_ranks import SlowRank


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCounts:
    committed: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSummary:
    generation: int
    world_size: int
    nodes: list[str]
    first_step: int | None
    last_step: int | None
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The fields are the keys of `report --json`, in this order; see RunView."""

    finished: bool
    stopped: kinds.Stopped | None
    failed: kinds.RunFailed | None
    steps: int
    epochs: int
    final_digest: str | None
    lost_steps: int
    goodput: float | None
    badput_s: dict[str, float]
    step_time_s: StepTime
    checkpoints: CheckpointCounts
    audits: AuditCounts
    rehearsals: ComparedSteps
    overlaps: ComparedSteps
    not_restored: dict[str, str]
    accepted: list[kinds.StepDiffered]
    snapshots: kinds.SnapshotInterval | None
    generations: list[GenerationSummary]
    recoveries: list[Recovery]
    slow_ranks: list[SlowRank]
    shards_by_rank: list[int]
    lineage: list[Ancestor]
    divergences: list[Divergence]
    replays: list[kinds.ReplayDiffered]
    edits: list[kinds.RecipeEdited]
    logged_by_rank: list[str]
    scheduled: list[ScheduledNode]
    unreadable_lines: int
    plain: PlainScript | None


def report_of(view: RunView) -> Report:
    return Report(
        finished=view.end is not None,
        stopped=view.stopped,
        failed=view.failed,
        steps=view.step,
        epochs=view.epochs,
        final_digest=view.end.digest or None if view.end else None,
        lost_steps=view.lost_steps,
        goodput=view.time.goodput if view.time else None,
        badput_s=view.time.badput_s if view.time else {},
        step_time_s=view.step_time_s,
        checkpoints=CheckpointCounts(committed=view.checkpoints.committed, failed=view.checkpoints.failed),
        audits=view.audits,
        rehearsals=view.rehearsals,
        overlaps=view.overlaps,
        not_restored=view.not_restored,
        accepted=view.accepted,
        snapshots=view.snapshots,
        generations=[
            GenerationSummary(**{each.name: getattr(one, each.name) for each in fields(GenerationSummary)})
            for one in view.generations
        ],
        recoveries=view.recoveries,
        slow_ranks=view.slow_ranks,
        shards_by_rank=view.shards_by_rank,
        lineage=view.lineage,
        divergences=view.divergences,
        replays=view.replays,
        edits=view.edits,
        logged_by_rank=view.logged_by_rank,
        scheduled=view.scheduled,
        unreadable_lines=view.unreadable_lines,
        plain=view.plain,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCheckpoint:
    step: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The fields are the keys of `status --json`, in this order; see RunView.

    steps: None until the recipe has said how long the run is.
    """

    state: str
    step: int
    steps: int | None
    generation: int
    world_size: int
    workers: list[Worker]
    last_checkpoint: LastCheckpoint | None
    stopped: kinds.Stopped | None = None
    plain: PlainScript | None = None


def status_of(view: RunView) -> Status:
    saved = view.checkpoints.newest
    return Status(
        state=view.state,
        step=view.newest.step if view.newest else 0,
        steps=view.length,
        generation=view.generation,
        world_size=view.world_size,
        workers=view.workers,
        last_checkpoint=LastCheckpoint(step=saved.step, age_s=max(0.0, view.now_s - saved.time))
        if saved
        else None,
        stopped=view.stopped,
        plain=view.plain,
    )
