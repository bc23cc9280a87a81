"""All that is shown of a run, as one frozen value: a pure function of what its files say.

Report, status, watch, page, Prometheus and TensorBoard render it, and compute nothing of their own:
a new figure is a field here and a line in each of them. What no event tells is None, never a guess.
Times are seconds since 1970, by the clocks of the nodes that wrote them; no duration is negative.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from elastic import events as kinds
from elastic.config.identity import Ancestor, Parent
from elastic.observe.doubts import ComparedSteps, Divergence, compared, divergences, not_restored
from elastic.observe.generations import Generation, Start, generations
from elastic.observe.goodput import TimeSpent, time_spent
from elastic.observe.incidents import Incident, incidents
from elastic.observe.logged_event import E, Events, LoggedEvent, by_generation, last, of_kind
from elastic.observe.recovery import Recovery, recoveries
from elastic.observe.series import Curves
from elastic.observe.step_columns import Floats, SlowRank, StepColumns, known, slow_ranks
from elastic.observe.step_line import StepLine

ALIVE_WITHIN_S = 10.0
_STEPS_WITHIN = 3  # where no heartbeat can be seen
_RECENT_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the files of a run say (reader.py).

    steps: what counts of the lines of metrics, without those that are unreadable; curves: the same
    as curves, None where the reader was not asked for them. newest: the last line. age_s: for how
    long no file has changed.
    """

    events: Events
    steps: StepColumns
    newest: StepLine | None
    unreadable_lines: int = 0
    age_s: float = 0.0
    curves: Curves | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    rank: int
    node: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """newest: a restore would try it first, and none has rejected it since. It may be gone: where
    all newer ones were rejected, retention may have deleted it.

    saving_s: seconds of each committed save.
    """

    committed: int
    failed: int
    fenced: int
    newest: LoggedEvent[kinds.CheckpointCommitted] | None
    saving_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainScript:
    """A script without this library: known by its restarts, its exit and its time, and by no step.

    restarts: how often it was started again, by cause. last_exit: in words; empty before the
    first. running_s: seconds of its generations.
    """

    restarts: dict[str, int]
    last_exit: str
    running_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView(Record):
    """A record, and what follows from it.

    state: `finished`; `running` while an agent is alive; else what became of the newest
    generation: `failed`, `drained` (an agent left it as planned, and saved what it could) or
    `interrupted` (its agents died without a last event, or waited in vain for others). The same
    command resumes a run that is drained or interrupted. now_s: the present, by the clock of what
    was recorded. end: the event that says that the run is complete.

    stopped: where the recipe ended the run before its last step. failed, traceback: how the newest
    generation ended, if training failed. plain: of a script without this library, which has no
    steps, saves and goodput here.

    step: the newest that counts; length: the step with which the run ends, None until the
    recipe has said it; highest_step: the newest one ever. epochs: that are complete.
    generation: the newest one, 0 before the first. world_size, workers: that train now. standbys:
    that wait for an assignment. restarts: in a row without a new step.

    lost_steps: that
    were done again. recent_step_s: the median of the newest steps. slow_ranks: for
    which the group waited, slow_now: in the newest generation that has steps. shards_by_rank: how
    many each rank of the newest generation computes, empty where all have as many, but for one.
    snapshots: what `--snapshot-every auto` chose last. lineage: the states of other runs that this
    one descends from, the oldest first. not_restored: variables that a restart did not bring back,
    with both values. accepted: steps that differed when they were done again, after which the run
    went on. replays: steps that gave another result when they were done again. edits: where a
    process with another text of the recipe went on. logged_by_rank: names in the metrics whose
    numbers are those of rank 0 alone. audits: done, which count and were without a difference, and
    failed, shards that differed. scheduled: agents that a scheduler started, with the fields of the
    event `node_scheduled`.
    """

    state: str
    now_s: float
    end: kinds.RunFinished | None
    stopped: kinds.Stopped | None
    failed: kinds.RunFailed | None
    traceback: str
    plain: PlainScript | None
    step: int
    length: int | None
    highest_step: int
    epochs: int
    generation: int
    world_size: int
    workers: list[Worker]
    standbys: int
    restarts: int
    lost_steps: int
    time: TimeSpent | None
    step_time_s: dict[str, float | None]
    recent_step_s: float | None
    generations: list[Generation]
    recoveries: list[Recovery]
    incidents: list[Incident]
    checkpoints: Checkpoints
    audits: dict[str, int]
    rehearsals: ComparedSteps
    overlaps: ComparedSteps
    not_restored: dict[str, str]
    accepted: list[kinds.StepDiffered]
    divergences: list[Divergence]
    replays: list[kinds.ReplayDiffered]
    edits: list[kinds.RecipeEdited]
    logged_by_rank: list[str]
    snapshots: kinds.SnapshotInterval | None
    slow_ranks: list[SlowRank]
    slow_now: list[SlowRank]
    shards_by_rank: list[int]
    lineage: list[Ancestor]
    scheduled: list[dict[str, Any]]


def view_of(
    record: Record, beat_ages_s: Mapping[str, float] | None = None, parent: Parent | None = None
) -> RunView:
    """beat_ages_s: seconds since the last heartbeat, by node; empty where the place to meet does
    not show them. parent: what the run began from, if that was another run.
    """
    events, trained, newest = record.events, record.steps, record.newest
    seconds = known(trained.seconds)
    ages_s = beat_ages_s or {}
    start, now_s = last(events, kinds.GenerationStarted), _now_s(record)
    number = start.generation if start else 0
    own = by_generation(events)[number]  # of the newest generation
    # Each generation says how long the run is when it begins to train, and the last at its end.
    of_length = kinds.RunStarted | kinds.RunFinished
    lengths = [0, *(each.event.steps for each in events if isinstance(each.event, of_length))]
    end, stopped = _end_of_run(events, start), last(events, kinds.Stopped)
    stop = stopped.event if stopped and end and end.steps == stopped.event.step else None
    state = "finished" if end else _state(events, own, record, ages_s)
    running_s = now_s if state == "running" else None
    workers, world_size = _training(own, start, ages_s) if start and state == "running" else ([], 0)
    begun = generations(events, trained, running_s)
    recovered = [] if start and start.event.plain else recoveries(begun)
    restores, started = _all(events, kinds.Restored), last(events, kinds.RunStarted)
    step = end.steps if end else newest.step if newest else 0
    # Not by time: an agent that leaves alone writes its last event once the others have committed
    # its state, in their next generation.
    failed = None if end else last(own, kinds.RunFailed)
    error = last(events, kinds.WorkerFailed) if failed else None
    plain, ended = None, last(events, kinds.GenerationEnded)
    if start and start.event.plain:
        last_exit = f"exit code {failed.event.exit_code}: {failed.event.reason}" if failed else ""
        last_exit = last_exit or (ended.event.cause if ended else "")
        plain = PlainScript(
            restarts=dict(Counter(each.cause for each in begun[1:])),
            last_exit="exit code 0" if end else last_exit,
            running_s=sum(max(0.0, each.ends_s - each.begins_s) for each in begun),
        )
    snapshots, moved = last(events, kinds.SnapshotInterval), last(events, kinds.ShardsMoved)
    return RunView(
        **{each.name: getattr(record, each.name) for each in fields(Record)},
        state=state,
        now_s=now_s,
        end=end,
        stopped=stop,
        failed=failed.event if failed else None,
        traceback=error.event.traceback if error else "",
        plain=plain,
        step=step,
        length=stop.steps if stop else lengths[-1] or None,
        highest_step=max([step, *(each.step + each.lost_steps for each in restores)]),
        epochs=end.epochs if end else started.event.epochs_done(step) if started else 0,
        generation=number,
        world_size=world_size,
        workers=workers,
        standbys=_standbys(events, ages_s) if state == "running" else 0,
        restarts=start.event.restarts if start and not last(own, kinds.FirstStep) else 0,
        lost_steps=sum(each.lost_steps for each in restores),
        time=time_spent(begun),
        step_time_s=_step_time(seconds),
        recent_step_s=float(np.median(seconds[-_RECENT_STEPS:])) if len(seconds) else None,
        generations=begun,
        recoveries=recovered,
        incidents=incidents(events, begun, recovered, state),
        checkpoints=checkpoints_of(events),
        audits={"done": int((trained.audited == 1).sum()), "failed": len(of_kind(events, kinds.AuditFailed))},
        rehearsals=compared(events, kinds.Rehearsed),
        overlaps=compared(events, kinds.Overlapped),
        not_restored=not_restored(events),
        accepted=[each for each in _all(events, kinds.StepDiffered) if each.accepted],
        divergences=divergences(events),
        replays=_all(events, kinds.ReplayDiffered),
        edits=_all(events, kinds.RecipeEdited),
        logged_by_rank=[
            *dict.fromkeys(name for each in _all(events, kinds.LoggedByRank) for name in each.names)
        ],
        snapshots=snapshots.event if snapshots else None,
        slow_ranks=slow_ranks(events, trained),
        slow_now=slow_ranks(events, trained[trained.generation == trained.generation.max(initial=0)]),
        shards_by_rank=moved.event.shards if moved and moved.generation >= number else [],
        lineage=[] if parent is None else [*parent.lineage],
        scheduled=[
            {"node": each.node} | each.event.fields() for each in of_kind(events, kinds.NodeScheduled)
        ],
    )


def _all(events: Events, kind: type[E]) -> list[E]:
    return [each.event for each in of_kind(events, kind)]


def _end_of_run(events: Events, start: Start | None) -> kinds.RunFinished | None:
    """The end of the run; of a plain script, that of its newest start: other arguments go on."""
    found = last(events, kinds.RunFinished)
    is_older = found and start and start.event.plain and found.generation < start.generation
    return found.event if found and not is_older else None


def checkpoints_of(events: Events) -> Checkpoints:
    """A rejection names a step, and not which of its checkpoints it is about: it counts for all
    that older generations committed there, until a later restore loads one of them.
    """
    commits = of_kind(events, kinds.CheckpointCommitted)
    by_step = {each.event.step: each for each in sorted(commits, key=lambda each: each.generation)}
    good: dict[int, int] = {}  # by step, in which generation it was written or loaded last
    # A generation restores before it commits, whatever its nodes' clocks say. A newer one may have
    # gone back behind a step that an older one committed.
    order = (kinds.CheckpointRejected, kinds.Restored, kinds.CheckpointCommitted)
    told = [each for each in events if type(each.event) in order]
    for each in sorted(told, key=lambda each: (each.generation, order.index(type(each.event)))):
        match each.event:
            case kinds.CheckpointRejected(step=step):
                good.pop(step, None)
            case kinds.CheckpointCommitted(step=step) | kinds.Restored(step=step, source="checkpoint"):
                good[step] = each.generation
            case _:
                pass
    found = [(generation, step) for step, generation in good.items() if step in by_step]
    return Checkpoints(
        committed=len(commits),
        failed=len(of_kind(events, kinds.CheckpointFailed)),
        fenced=len(of_kind(events, kinds.CheckpointFenced)),
        newest=by_step[max(found)[1]] if found else None,
        saving_s=[each.event.seconds for each in commits],
    )


def _now_s(record: Record) -> float:
    """By the clock of what was recorded; a wall clock that was set since is another one."""
    times_s = [each.time for each in record.events]
    if record.newest is not None and record.newest.time is not None:
        times_s.append(record.newest.time)
    return max(times_s, default=0.0) + record.age_s


def _state(events: Events, own: Events, record: Record, beat_ages_s: Mapping[str, float]) -> str:
    """Of a run that has not finished. own: events of the newest generation."""
    goodbyes = [each for each in events if isinstance(each.event, kinds.GOODBYES)]
    # A node whose agent wrote its last event is gone, however young its heartbeat. A node that
    # comes back has a new name, because each agent process is a node of its own.
    gone = {each.node for each in goodbyes}
    is_alive = any(age_s < ALIVE_WITHIN_S for node, age_s in beat_ages_s.items() if node not in gone)
    newest = record.newest
    if newest is not None and newest.time is not None:
        # A young step proves a live agent; its heartbeats may be in etcd, or in another folder.
        within_s = max(ALIVE_WITHIN_S, 0.0 if beat_ages_s else _STEPS_WITHIN * (newest.seconds or 0.0))
        step, is_young = (newest.time, newest.generation), _now_s(record) - newest.time < within_s
        is_alive |= is_young and not any(
            each.time >= step[0] and each.generation >= step[1] for each in goodbyes
        )
    if is_alive:  # perhaps after a failure, and waiting for others
        return "running"
    if last(own, kinds.RunFailed):
        return "failed"
    left = _all(own, kinds.RunInterrupted)
    return "drained" if left and not any(each.gave_up for each in left) else "interrupted"


def _training(own: Events, start: Start, beat_ages_s: Mapping[str, float]) -> tuple[list[Worker], int]:
    """The workers that train in the newest generation; none while nodes wait for others."""
    if last(own, kinds.GenerationEnded):
        return [], 0
    alive = {node for node, age_s in beat_ages_s.items() if age_s < ALIVE_WITHIN_S}
    dead = {*start.event.nodes} - alive if beat_ages_s else set()
    gone = {(each.node, each.event.pid) for each in of_kind(own, kinds.WorkerExited)}
    workers = [
        Worker(each.event.rank, each.node, each.event.pid)
        for each in of_kind(own, kinds.WorkerStarted)
        if (each.node, each.event.pid) not in gone and each.node not in dead
    ]
    return sorted(workers, key=lambda each: each.rank), len(workers) if dead else start.event.world_size


def _standbys(events: Events, beat_ages_s: Mapping[str, float]) -> int:
    """On nodes that are alive; where no heartbeat can be seen, that have not said goodbye."""
    waits, gone = set[tuple[str, int]](), set[str]()
    for each in events:
        match each.event:
            case kinds.StandbyWaits(pid=pid):
                waits.add((each.node, pid))
            case kinds.StandbyEnded(pid=pid) | kinds.WorkerStarted(pid=pid):
                waits.discard((each.node, pid))
            case event if isinstance(event, kinds.GOODBYES):
                gone.add(each.node)
            case _:
                pass
    dead = {node for node, _ in waits if beat_ages_s.get(node, math.inf) >= ALIVE_WITHIN_S}
    return sum(node not in (gone | dead if beat_ages_s else gone) for node, _ in waits)


def _step_time(seconds: Floats) -> dict[str, float | None]:
    """seconds: of each step that says them. None before the first step."""
    if not len(seconds):
        return {"median": None, "p99": None}
    p99 = np.quantile(seconds, 0.99, method="inverted_cdf")
    return {"median": float(np.median(seconds)), "p99": float(p99)}
