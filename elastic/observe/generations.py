"""Each generation of a run: when it trained, when and why it ended, and what followed it.

A generation ends with the next start, or, where the command was given again, with its planned stop
or its last sign of life. Between its first and its last step that counts it trained; before and
after that it did not. It does not promise to know why a generation ended: where no event tells, the
cause of the next one is said.

Times are those of the nodes' clocks, which agree to within a second or so (NTP).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from elastic import events as kinds
from elastic.errors import EXIT_INTERRUPTED
from elastic.observe import step_columns
from elastic.observe.logged_event import Events, LoggedEvent, by_generation, first, of_kind
from elastic.observe.step_columns import NO_STEPS, StepColumns, known

# What follows a generation until the next one begins: nothing, for that begins at once; a planned
# stop; a time in which no node was there.
AT_ONCE, STOP, DOWN = "", "stop", "down"
REHEARSAL = "rehearsal"  # the cause of a generation that began for a comparison alone
NODE_LOST = "node lost"  # the cause of a generation, and the end of the sentence about the one before
_LONGEST_MESSAGE = 100
_NEWEST_STEPS = 1000  # that tell when a generation stood still

Start = LoggedEvent[kinds.GenerationStarted]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The steps include those that were lost later; None if the generation trained no step.

    own: its events. after: the start of the next one. trains_s, trained_s: when its first step that
    counts began, and its last one ended. useful_s: seconds in these. step_times_s: when its newest
    steps ended that count, and then the newest one that the next generation lost. why: what ended
    the generation before, in words; the cause where there was none. ends_s: seconds since 1970.
    until_s: when the next one began; of the last one the present, or the last sign of life. gap:
    what lies between these two.
    """

    start: Start
    after: Start | None
    own: Events
    trains_s: float | None
    trained_s: float | None
    useful_s: float
    step_times_s: Sequence[float]
    first_step: int | None
    last_step: int | None
    why: str
    ends_s: float
    until_s: float
    gap: str

    @property
    def generation(self) -> int:
        return self.start.generation

    @property
    def world_size(self) -> int:
        return self.start.event.world_size

    @property
    def nodes(self) -> list[str]:
        return self.start.event.nodes

    @property
    def cause(self) -> str:
        return self.start.event.cause

    @property
    def begins_s(self) -> float:
        return self.start.time

    @property
    def new_step(self) -> LoggedEvent[kinds.FirstStep] | None:
        return first(self.own, kinds.FirstStep)


def generations(events: Events, steps: StepColumns, now_s: float | None = None) -> list[Generation]:
    """steps: that count. now_s: where the run goes on, seconds since 1970."""
    starts, own = of_kind(events, kinds.GenerationStarted), by_generation(events)
    trained, found = step_columns.by_generation(steps), list[Generation]()
    reached: int | None = None  # the newest step that counted when the next state was restored
    lost_s: list[float] = []  # when it had ended, as the next generation says: its line may be lost
    triples = [*zip([None, *starts], starts, [*starts[1:], None], strict=False)]
    for before, start, after in reversed(triples):
        then, counted = own[start.generation], trained.get(start.generation, NO_STEPS)
        times_s, seconds = known(counted.time).tolist(), np.nan_to_num(counted.seconds)
        trained_s = times_s[-1] if times_s else None
        last_s = max(start.time, *(each.time for each in then), trained_s or start.time)
        until_s = max(last_s, now_s or last_s) if after is None else after.time
        is_resumed = after is not None and after.event.cause == "resume"
        stop = left_as_planned(then, start) if after is None or is_resumed else None
        ends_s, gap = until_s, AT_ONCE
        if stop is not None:
            ends_s, gap = min(stop.time, until_s), STOP
        elif is_resumed:
            ends_s, gap = min(max([last_s, *lost_s]), until_s), DOWN
        restores = [each.event for each in of_kind(then, kinds.Restored)]
        # A step that is no line of the metrics yet as rank 0 dies does not count, although other
        # workers have finished it: `generation_ended` tells of it too, and is asked only while
        # nothing was restored.
        ended = [each.event.step for each in of_kind(then, kinds.GenerationEnded)]
        last_step = max([*counted.step[-1:].tolist(), 0, *(ended if reached is None else [reached])])
        is_trained = bool(restores) and last_step > restores[0].step
        found.append(
            Generation(
                start=start,
                after=after,
                own=then,
                trains_s=times_s[0] - float(seconds[~np.isnan(counted.time)][0]) if times_s else None,
                trained_s=trained_s,
                useful_s=float(seconds.sum()),
                step_times_s=[*times_s[-_NEWEST_STEPS:], *lost_s[-1:]],
                first_step=restores[0].step + 1 if is_trained else None,
                last_step=last_step if is_trained else None,
                why=start.event.cause if before is None else _why(own[before.generation], before, start),
                ends_s=ends_s,
                until_s=until_s,
                gap=gap,
            )
        )
        if restores:
            reached = max(each.step + each.lost_steps for each in restores)
        lost_s = [each.last_step_s for each in restores if each.last_step_s is not None]
    return found[::-1]


def left_as_planned(own: Events, start: Start) -> LoggedEvent[kinds.RunInterrupted] | None:
    """The last event of the last node of a generation, if all were told to leave.

    A node that leaves while others train on writes the same event; where those crash before they
    have formed a generation without it, it was a crash. own: events of the generation.
    """
    left = of_kind(own, kinds.RunInterrupted)
    planned = {each.node for each in left if not each.event.gave_up}
    return left[-1] if left and planned.issuperset(start.event.nodes) else None


def ended_by_loss(own: Events) -> LoggedEvent[kinds.GenerationEnded] | None:
    """Where the other nodes noticed that one was lost. own: events of one generation."""
    ends = of_kind(own, kinds.GenerationEnded)
    return next((each for each in ends if each.event.cause.endswith(NODE_LOST)), None)


def lost_nodes(of: Generation) -> list[str]:
    """The nodes that a generation has lost, before the next one or the run's end.

    Where the others gave up, no generation without them tells which they were: all that said
    nothing of its end.
    """
    cause = "resume" if of.after is None else of.after.event.cause
    if of.after is not None and cause == NODE_LOST:
        return [node for node in of.nodes if node not in of.after.event.nodes]
    if cause != "resume" or ended_by_loss(of.own) is None:
        return []
    ends = kinds.GenerationEnded | kinds.RunInterrupted
    told = {each.node for each in of.own if isinstance(each.event, ends)}
    return [node for node in of.nodes if node not in told]


def _why(own: Events, before: Start, after: Start) -> str:
    """What ended the generation before. own: its events."""
    cause = after.event.cause
    if cause == "failure":
        # The first worker that failed by itself. A hang and an exception say more than an exit.
        messages = {each.event.rank: each.event.message for each in of_kind(own, kinds.WorkerFailed)}
        said = (failure_text(each.event, messages) for each in own)
        return next(filter(None, said), cause)
    then, now = set(before.event.nodes), set(after.event.nodes)
    changed = now - then if cause == "node joined" else then - now
    return f"{cause}: {', '.join(sorted(changed))}" if changed and cause.startswith("node ") else cause


def failure_text(event: kinds.Event, messages: Mapping[int, str] = MappingProxyType({})) -> str:
    """Empty unless a worker failed, and by itself. messages: of the exceptions, by rank."""
    match event:
        case kinds.HangDetected():
            return f"rank {event.rank} hung"
        case kinds.WorkerFailed():
            return f"rank {event.rank} failed ({_short(event.message)})"
        case kinds.WorkerExited(victim=False, signal=str()):
            return f"rank {event.rank} was killed by {event.signal}"
        case kinds.WorkerExited(victim=False, code=code) if code not in (0, EXIT_INTERRUPTED):
            return f"rank {event.rank} failed ({_short(messages.get(event.rank, f'exit code {code}'))})"
        case _:
            return ""


def _short(message: str) -> str:
    line = message.strip().partition("\n")[0]
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]}..."
