"""What each recovery took, in phases between six marks; no phase is negative.

A recovery belongs to a generation that follows another one. It is a line of six marks, and its
phases are the times between neighbouring marks; where all marks are known, the phases add up to the
total, unless a try before it came to no new step, for then the total begins with the first fault:

    fault ── detect ──> end ── rendezvous ──> gone ── down ──> start ── restore ──> state
                                                             state ── first step ──> new step

    fault      the first sign of what ended the generation before
    end        an agent first recorded that the generation before is over (`generation_ended`)
    gone       no node was left, and the command had to be given again (generation_end.py); where
               nodes were left, the same as the start
    start      the generation has formed (`generation_started`)
    state      every rank has loaded the state (`restored`)
    new step   rank 0 finished a step that was never trained before (`first_step`)

The last phase includes the replay of lost steps, because the run is where it was before the fault
only then. Six marks rather than one total, because each has another remedy: a hang timeout, the
network of the rendezvous, what starts the command again, the store or the size of the state, the
interval of snapshots.

Times are those of one_clock.py, which nodes share to within a second or so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile

from elastic import events as kinds
from elastic.observe.generation_end import (
    REHEARSAL,
    Start,
    down_since_s,
    last_seen_s,
    last_sign_s,
    planned_stop,
    why_ended,
)
from elastic.observe.logged_event import (
    Events,
    LoggedEvent,
    by_generation,
    first,
    last,
    of_kind,
)
from elastic.observe.step_columns import StepColumns

# A fault that ends a generation lets the group finish two more steps at most: the one in flight,
# and the last one of a drain. After more steps than that the fault was survived (a slow
# disk, a paused uploader), and the end has another cause.
_STEPS_AFTER_A_FAULT = 2
PHASES = ("detect", "rendezvous", "down", "restore", "first_step")
SIGNS = (
    kinds.WorkerExited,
    kinds.WorkerFailed,
    kinds.HangDetected,
    kinds.DrainRequested,
    kinds.GenerationEnded,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How a generation came after the one before; the phases are explained above.

    down_s: 0 where nodes were left; a part of `badput_s["down"]` in goodput.py. tries: how many
    generations there were since the last one with a new step, this one included; the phases
    and the lost steps are those of this one, the total is that of all of them. generation: the one
    that it led to; why: what ended the one before, in words. step, ended_s: its first new step, and
    when that ended, in seconds since 1970; None while there is none.
    """

    cause: str
    lost_steps: int
    source: str | None
    detect_s: float | None
    rendezvous_s: float | None
    down_s: float | None
    restore_s: float | None
    first_step_s: float | None
    total_s: float | None
    tries: int
    generation: int
    step: int | None
    ended_s: float | None
    why: str


def recoveries(events: Events, trained: StepColumns) -> list[Recovery]:
    """One for each generation that is not the start of the run."""
    starts, own = of_kind(events, kinds.GenerationStarted), by_generation(events)
    seen_s = {each.generation: last_seen_s(own[each.generation]) for each in starts}
    return [
        recovery_of(own, trained, since_new_step(own, starts[: place + 1]), seen_s)
        for place, start in enumerate(starts)
        if start.event.cause not in ("start", REHEARSAL)
    ]


def recovery_line(found: Sequence[Recovery]) -> str:
    """What the last of them cost, in one line: where the run is back, how soon, and why.

    Empty where it has brought no new step. Where a fault met a generation that had brought none
    yet, it is one recovery in several tries, since the first of the faults.
    """
    newest = found[-1]
    if newest.step is None or newest.total_s is None:
        return ""
    # A rehearsal among the tries is no recovery.
    failed = takewhile(lambda each: each.step is None, found[-2 : -newest.tries - 1 : -1])
    tries = [*reversed([*failed]), newest]
    down_s, lost = sum(each.down_s or 0.0 for each in tries), sum(each.lost_steps for each in tries)
    down = f" (for {down_s:.2f} s of it no node answered)" if down_s else ""
    number = f" in {newest.tries} tries" if newest.tries > 1 else ""
    return (
        f"back at step {newest.step} after {newest.total_s:.2f} s{down}{number}: {tries[0].why},"
        f" {lost} step{'' if lost == 1 else 's'} lost"
    )


def since_new_step(own: Mapping[int, Events], starts: Sequence[Start]) -> list[Start]:
    """The last of `starts`, and those before it, down to the newest of them that brought a new step
    or was stopped as planned, with all of the run.

    own: events by generation.
    """
    found = [starts[-1]]
    for before in reversed(starts[:-1]):
        found.insert(0, before)
        then = own[before.generation]
        if first(then, kinds.FirstStep) or planned_stop(then, before, found[1]):
            break
    return found


def recovery_of(
    own: Mapping[int, Events], trained: StepColumns, starts: Sequence[Start], seen_s: Mapping[int, float]
) -> Recovery:
    """The recovery that the last of `starts` ended; they are as `since_new_step` gives them.

    own: by generation, the events of these at least. seen_s: by generation, the time of its last
    event of any kind.
    """
    start, before = starts[-1], starts[-2] if len(starts) > 1 else None
    now = own[start.generation]
    restored, new_step = last(now, kinds.Restored), first(now, kinds.FirstStep)
    fault_s, end_s, gone_s = None, None, start.time
    if before is not None:
        fault_s, end_s = _ended(own, trained, before, start)
        last_s = last_sign_s(before, trained.counted.get(before.generation), seen_s)
        since_s = down_since_s(before, start, [*own[before.generation], *now], last_s)
        gone_s = start.time if since_s is None else since_s
    begin = start.time if fault_s is None else fault_s
    marks = [begin, end_s, gone_s, start.time, _time(restored), _time(new_step)]
    detect_s, rendezvous_s, down_s, restore_s, first_step_s = _phases_s(marks)
    tries = max(1, len(starts) - 1)
    if tries > 1:
        first_fault_s = _ended(own, trained, *starts[:2])[0]
        begin = min(begin, starts[1].time if first_fault_s is None else first_fault_s)
    return Recovery(
        cause=start.event.cause,
        lost_steps=restored.event.lost_steps if restored else 0,
        source=restored.event.source if restored else None,
        detect_s=detect_s,
        rendezvous_s=rendezvous_s,
        down_s=down_s,
        restore_s=restore_s,
        first_step_s=first_step_s,
        total_s=max(mark for mark in marks if mark is not None) - begin if new_step else None,
        tries=tries,
        generation=start.generation,
        step=new_step.event.step if new_step else None,
        ended_s=_time(new_step),
        why=start.event.cause if before is None else why_ended(own[before.generation], before, start),
    )


def _ended(
    own: Mapping[int, Events], trained: StepColumns, before: Start, after: Start
) -> tuple[float | None, float | None]:
    """As `_fault`, of one generation before another; None and None for a planned stop.

    Then the clock starts with the generation that resumes: how long the run lay still depends on
    the user, and says nothing about the recovery.
    """
    then, restored = own[before.generation], last(own[after.generation], kinds.Restored)
    if planned_stop(then, before, after) is not None:
        return None, None
    step_times_s = [*trained.times_s.get(before.generation, ())]
    if restored is not None and restored.event.last_step_s is not None:
        # Where that step was lost, its line is gone; one of an older generation is earlier.
        step_times_s.append(restored.event.last_step_s)
    fault_s, noticed_s = _fault(then, step_times_s)
    if fault_s is None:  # all nodes died without a word
        fault_s = max(step_times_s, default=None)
    return fault_s, noticed_s


def _phases_s(marks: list[float | None]) -> list[float | None]:
    """The time between neighbouring marks; None if one of the two is unknown.

    A mark of a node whose clock is a little behind may be earlier than one before it, and counts as
    simultaneous: so no phase is negative, and the phases add up.
    """
    reached = -math.inf
    ordered: list[float | None] = []
    for mark in marks:
        reached = reached if mark is None else max(reached, mark)
        ordered.append(None if mark is None else reached)
    return [None if a is None or b is None else b - a for a, b in pairwise(ordered)]


def _fault(own: Events, step_times_s: Sequence[float]) -> tuple[float | None, float | None]:
    """(when a generation's fault first showed, when its end was noticed), from its `own` events.

    step_times_s: when its steps ended, in their order.

    None if no event tells. The candidates for the first sign are:

    - What happened to a worker, and the request of a drain, at their own times.
    - A hang, at the time of the last progress before it: the run has stood still since then, and
      not only since the agent's patience ended.
    - A fault that a plan injected, if the generation did not survive it. It comes before the signs
      that it causes, and an injected pause has no other sign. Only the newest one counts: each
      earlier one had its own consequences, or none.
    - If there is none of these before the end was noticed, a node fell silent, with its machine or
      its network. Nothing shows that but the missing steps. The group has stood still since the
      last step before, because each step needs every node.
    """
    noticed = _time(first(own, kinds.GenerationEnded))
    signs = [
        each.time - (each.event.silence_s if isinstance(each.event, kinds.HangDetected) else 0.0)
        for each in own
        if isinstance(each.event, SIGNS)
    ]
    if noticed is not None and min(signs) >= noticed:
        signs.append(max((time for time in step_times_s if time <= noticed), default=noticed))
    injected = [
        each.time
        for each in of_kind(own, kinds.FaultInjected)
        if not _exceeds(step_times_s, each.time, _STEPS_AFTER_A_FAULT)
    ]
    return min(injected[-1:] + signs, default=None), noticed


def _exceeds(times_s: Sequence[float], time_s: float, most: int) -> bool:
    """Whether more than `most` of the times are later; the last ones mostly are."""
    later = (each for each in reversed(times_s) if each > time_s)
    return sum(1 for _ in islice(later, most + 1)) > most


def _time(event: LoggedEvent[kinds.Event] | None) -> float | None:
    return None if event is None else event.time
