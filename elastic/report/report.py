"""What a run did, computed from its events and metrics; no duration is negative.

Nodes share one clock to within a second or so (observe/one_clock.py). What no event tells is None,
never a guess. What a recovery took is measured in recovery.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastic import events as kinds
from elastic.config.parent import Ancestor, Parent
from elastic.observe.doubts import logged_by_rank, not_restored
from elastic.observe.generation_end import Start
from elastic.observe.goodput import time_spent
from elastic.observe.logged_event import (
    Events,
    by_generation,
    first,
    in_generation,
    last,
    of_kind,
)
from elastic.observe.recovery import Recovery, recoveries
from elastic.observe.slow_ranks import SlowRank, slow_ranks
from elastic.observe.step_columns import StepColumns, columns_of
from elastic.observe.step_line import StepLine
from elastic.report.plain_script import PlainScript, plain_script
from elastic.report.plain_script import finished as end_of
from elastic.report.shards import shards_by_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds; None before the first step."""

    median: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCounts:
    committed: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSteps:
    """Steps that were done twice, by other workers. alike: of which both results were the same."""

    count: int
    alike: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCounts:
    """done: audited steps that count, all without a difference. failed: shards that differed."""

    done: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSummary:
    """The steps include those that were lost later; None if the generation trained no step."""

    generation: int
    world_size: int
    nodes: list[str]
    first_step: int | None
    last_step: int | None
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledNode:
    """An agent that a scheduler started; the fields are those of the event `node_scheduled`."""

    node: str
    scheduler: str
    job: str
    array_job: str | None
    array_task: int | None
    restarts: int | None
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The ranks' states differed after a step.

    node: the one that was wrong, or one of several of which one was; None if it is not known or no
    machine was. verdict: machine or recipe; None while the step was not done again.
    """

    step: int
    node: str | None
    entry: str
    verdict: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The fields are the keys of `report --json`, in this order.

    stopped: where the recipe ended the run before its last step, if it did. failed: how the newest
    generation ended, if training failed. goodput: the share of the run's time that went into steps
    that count, 0 to 1; None before the first generation. badput_s: the other seconds, by what they
    went to (goodput.py).
    slow_ranks: those for which the group waited (slow_ranks.py). shards_by_rank: how many each rank
    of the newest generation computes, empty where all have as many, but for one.
    snapshots: what `--snapshot-every auto` chose last; None if it chose nothing. lineage: the
    states of other runs that this one descends from, oldest first.
    not_restored: variables that a restart did not bring back, with both values. accepted: steps
    that differed when they were done again, after which the run went on.
    replays: steps that gave another result when they were done again. edits: where a process with
    another text of the recipe went on.
    logged_by_rank: names in the metrics whose numbers are those of rank 0 alone. scheduled: the
    agents that a scheduler started, by the time of their starts. unreadable_lines: of the metrics,
    whose steps no figure here has. plain: of a script without this library, which has no steps,
    saves and goodput here.
    """

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


def _compared(events: Events, kind: type[kinds.Rehearsed] | type[kinds.Overlapped]) -> ComparedSteps:
    found = [each.event for each in of_kind(events, kind)]
    alike = sum(each.verdict == "alike" for each in found)
    return ComparedSteps(count=len(found), alike=alike, seconds=sum(each.seconds for each in found))


def summarise(
    events: Events,
    lines: Sequence[StepLine] | StepColumns,
    parent: Parent | None = None,
    now_s: float | None = None,
) -> Report:
    """`events` as `read_events` gives them, `lines` of metrics in the order of their steps, or what
    counts of them.

    parent: what the run began from, if that was another run. now_s: seconds since 1970, where the
    run goes on.
    """
    trained = lines if isinstance(lines, StepColumns) else columns_of(lines)
    finished, plain = end_of(events), plain_script(events, now_s)
    started = last(events, kinds.RunStarted)
    snapshots = last(events, kinds.SnapshotInterval)
    spent = time_spent(events, trained, now_s)
    steps = trained.last_step
    return Report(
        finished=finished is not None,
        stopped=stopped_early(events),
        failed=None if finished else last_failure(events),
        steps=finished.event.steps if finished else steps,
        epochs=finished.event.epochs if finished else started.event.epochs_done(steps) if started else 0,
        final_digest=finished.event.digest or None if finished else None,
        lost_steps=sum(each.event.lost_steps for each in of_kind(events, kinds.Restored)),
        goodput=spent.goodput if spent else None,
        badput_s=spent.badput_s if spent else {},
        step_time_s=_step_time_s(trained),
        checkpoints=CheckpointCounts(
            committed=len(of_kind(events, kinds.CheckpointCommitted)),
            failed=len(of_kind(events, kinds.CheckpointFailed)),
        ),
        audits=AuditCounts(
            done=trained.num_audited,
            failed=len(of_kind(events, kinds.AuditFailed)),
        ),
        rehearsals=_compared(events, kinds.Rehearsed),
        overlaps=_compared(events, kinds.Overlapped),
        not_restored=not_restored(events),
        accepted=[each.event for each in of_kind(events, kinds.StepDiffered) if each.event.accepted],
        snapshots=snapshots.event if snapshots else None,
        generations=_generations(events, trained),
        recoveries=[] if plain else recoveries(events, trained),
        slow_ranks=slow_ranks(events, trained.paces),
        shards_by_rank=shards_by_rank(events),
        lineage=[] if parent is None else [*parent.lineage],
        divergences=_divergences(events),
        replays=[each.event for each in of_kind(events, kinds.ReplayDiffered)],
        edits=[each.event for each in of_kind(events, kinds.RecipeEdited)],
        logged_by_rank=logged_by_rank(events),
        scheduled=_scheduled(events),
        unreadable_lines=trained.num_unreadable,
        plain=plain,
    )


def _scheduled(events: Events) -> list[ScheduledNode]:
    return [
        ScheduledNode(node=each.node, **each.event.fields()) for each in of_kind(events, kinds.NodeScheduled)
    ]


def _divergences(events: Events) -> list[Divergence]:
    """One for each node that was wrong; differences without a verdict come last."""
    found, judged = [], set()
    for each in of_kind(events, kinds.DivergenceJudged):
        event = each.event
        judged.add(event.step)
        nodes: list[str | None] = [*event.nodes] or [None]
        found += [
            Divergence(step=event.step, node=node, entry=event.entry, verdict=event.verdict) for node in nodes
        ]
    found += [
        Divergence(step=each.event.step, node=None, entry=each.event.entry, verdict=None)
        for each in of_kind(events, kinds.DivergenceDetected)
        if each.event.step not in judged
    ]
    return found


def stopped_early(events: Events) -> kinds.Stopped | None:
    """Where the recipe ended the run, if the run ended there."""
    finished, stopped = last(events, kinds.RunFinished), last(events, kinds.Stopped)
    ended_there = finished and stopped and finished.event.steps == stopped.event.step
    return stopped.event if stopped and ended_there else None


def last_failure(events: Events) -> kinds.RunFailed | None:
    """How the newest generation ended, if it failed.

    Not by time: an agent that leaves alone writes its last event once the others have committed its
    state, in their next generation.
    """
    start = last(events, kinds.GenerationStarted)
    failed = last(in_generation(events, start.generation if start else 0), kinds.RunFailed)
    return failed.event if failed else None


def _step_time_s(trained: StepColumns) -> StepTime:
    count = len(trained.seconds)
    if not count:
        return StepTime(median=None, p99=None)
    places = [(count - 1) // 2, count // 2, math.ceil(0.99 * count) - 1]
    below, above, p99 = np.partition(trained.seconds, places)[places].tolist()
    return StepTime(median=(below + above) / 2, p99=p99)


def _generations(events: Events, trained: StepColumns) -> list[GenerationSummary]:
    own = by_generation(events)
    found, reached = [], None
    for start in reversed(of_kind(events, kinds.GenerationStarted)):
        then = own[start.generation]
        found.append(_generation(start, then, reached, trained.last_of.get(start.generation, 0)))
        if restored := of_kind(then, kinds.Restored):
            reached = max(each.event.step + each.event.lost_steps for each in restored)
    return found[::-1]


def _generation(start: Start, own: Events, reached: int | None, last_kept: int) -> GenerationSummary:
    """reached: the newest step that counted when the next state was restored, None where none was.
    last_kept: the last step of this generation that is still in the metrics, 0 for none.

    Its last step may have been lost since. A step that is no line of the metrics yet as rank 0 dies
    does not count, although other workers have finished it: `generation_ended` tells of it too, and
    is asked only while nothing was restored.
    """
    restored = first(own, kinds.Restored)
    ended = [each.event.step for each in of_kind(own, kinds.GenerationEnded)]
    last_step = max([last_kept, *(ended if reached is None else [reached])])
    trained = restored is not None and last_step > restored.event.step
    return GenerationSummary(
        generation=start.generation,
        world_size=start.event.world_size,
        nodes=start.event.nodes,
        first_step=restored.event.step + 1 if restored is not None and trained else None,
        last_step=last_step if trained else None,
        cause=start.event.cause,
    )
