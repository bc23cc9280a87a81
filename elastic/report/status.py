"""Where a run stands now, computed from its events, its newest step and its nodes' heartbeats.

It does not promise to be newer than a heartbeat: a killed agent counts as alive for
`ALIVE_WITHIN_S`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from elastic import events as kinds
from elastic.observe.generation_end import Start
from elastic.observe.logged_event import Events, in_generation, last, of_kind
from elastic.observe.newest_checkpoint import newest_checkpoint
from elastic.observe.step_line import StepLine
from elastic.report.plain_script import PlainScript, finished, plain_script
from elastic.report.report import last_failure, stopped_early

ALIVE_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    rank: int
    node: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCheckpoint:
    step: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The fields are the keys of `status --json`, in this order.

    state: `finished`; `running` while an agent is alive; else what became of the newest generation:
    `failed`, `drained` (an agent left it as planned, and saved what it could) or `interrupted` (its
    agents died without a last event, as by a power cut or a SIGKILL, or waited in vain for others).
    The same command resumes a run that is drained or interrupted. steps: None until the recipe has
    said how long the run is. stopped: where the recipe ended a finished run early. plain: of a
    script without this library, which saves for itself.
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


def status(events: Events, newest: StepLine | None, beat_ages_s: Mapping[str, float], now: float) -> Status:
    """now: in seconds since 1970, by the clock of the records.

    beat_ages_s: seconds since the last heartbeat, by node.
    """
    start = last(events, kinds.GenerationStarted)
    state = _state(events, alive=_is_stepping(events, newest, now) or _is_beating(events, beat_ages_s))
    saved = newest_checkpoint(events)
    # Each generation says how long the run is when it begins to train, and the last one at its end.
    lengths = (
        each.event.steps
        for each in events[::-1]
        if isinstance(each.event, kinds.RunStarted | kinds.RunFinished)
    )
    stopped = stopped_early(events)
    workers, world_size = _training(events, start, beat_ages_s) if start and state == "running" else ([], 0)
    return Status(
        state=state,
        step=newest.step if newest else 0,
        steps=(next(lengths, None) or None) if stopped is None else stopped.steps,
        generation=start.generation if start else 0,
        world_size=world_size,
        workers=workers,
        last_checkpoint=LastCheckpoint(step=saved.event.step, age_s=max(0.0, now - saved.time))
        if saved
        else None,
        stopped=stopped,
        plain=plain_script(events, now if state == "running" else None),
    )


def _state(events: Events, *, alive: bool) -> str:
    if finished(events):
        return "finished"
    if alive:  # perhaps after a failure, and waiting for others
        return "running"
    if last_failure(events):
        return "failed"
    start = last(events, kinds.GenerationStarted)
    current = in_generation(events, start.generation if start else 0)
    left = of_kind(current, kinds.RunInterrupted)
    return "drained" if left and not any(each.event.gave_up for each in left) else "interrupted"


def _is_beating(events: Events, beat_ages_s: Mapping[str, float]) -> bool:
    """A node whose agent wrote its last event is gone, however young its heartbeat.

    A node that comes back has a new name, because each agent process is a node of its own.
    """
    gone = {each.node for each in events if isinstance(each.event, kinds.GOODBYES)}
    return any(age_s < ALIVE_WITHIN_S for node, age_s in beat_ages_s.items() if node not in gone)


def _is_stepping(events: Events, newest: StepLine | None, now: float) -> bool:
    """A young step proves a live agent; its heartbeats may be in etcd, or in another folder."""
    if newest is None or newest.time is None or now - newest.time >= ALIVE_WITHIN_S:
        return False
    later = [each for each in events if each.time >= newest.time and each.generation >= newest.generation]
    return not any(isinstance(each.event, kinds.GOODBYES) for each in later)


def _training(events: Events, start: Start, beat_ages_s: Mapping[str, float]) -> tuple[list[Worker], int]:
    """The workers that train in the newest generation; none while nodes wait for others.

    beat_ages_s: empty where the place to meet does not show heartbeats.
    """
    own = in_generation(events, start.generation)
    if last(own, kinds.GenerationEnded):
        return [], 0
    alive = {node for node, age_s in beat_ages_s.items() if age_s < ALIVE_WITHIN_S}
    dead = {*start.event.nodes} - alive if beat_ages_s else set()
    workers = [worker for worker in _workers(own) if worker.node not in dead]
    return workers, len(workers) if dead else start.event.world_size


def _workers(own: Events) -> list[Worker]:
    """The workers of a generation that started and have not exited."""
    gone = {(each.node, each.event.pid) for each in of_kind(own, kinds.WorkerExited)}
    there = (
        Worker(rank=each.event.rank, node=each.node, pid=each.event.pid)
        for each in of_kind(own, kinds.WorkerStarted)
        if (each.node, each.event.pid) not in gone
    )
    return sorted(there, key=lambda worker: worker.rank)
