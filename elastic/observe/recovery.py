"""What each recovery took, in phases between six marks; no phase is negative.

A recovery belongs to a generation that follows another one. It is a line of six marks, and its
phases are the times between neighbouring marks; where all marks are known, the phases add up to the
total, unless a try before it came to no new step, for then the total begins with the first fault:

    fault ── detect ──> end ── rendezvous ──> gone ── down ──> start ── restore ──> state
                                                             state ── first step ──> new step

    fault      the first sign of what ended the generation before
    end        an agent first recorded that the generation before is over (`generation_ended`)
    gone       no node was left, and the command had to be given again (generations.py); where
               nodes were left, the same as the start
    start      the generation has formed (`generation_started`)
    state      every rank has loaded the state (`restored`)
    new step   rank 0 finished a step that was never trained before (`first_step`)

The last phase includes the replay of lost steps, because the run is where it was before the fault
only then. Six marks rather than one total, because each has another remedy: a hang timeout, the
network of the rendezvous, what starts the command again, the store or the size of the state, the
interval of snapshots.

Times are those of the nodes' clocks, which agree to within a second or so (NTP).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from elastic import events as kinds
from elastic.observe.generations import DOWN, REHEARSAL, STOP, Generation
from elastic.observe.logged_event import LoggedEvent, first, last, of_kind

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
    that it led to; why: what ended the one before, in words. standby: all workers were standbys.
    step, ended_s: its first new step, and when that ended, in seconds since 1970; None while there
    is none. line: all tries in one sentence; empty while there is no new step.
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
    standby: bool
    tries: int
    generation: int
    step: int | None
    ended_s: float | None
    why: str
    line: str


def recoveries(generations: Sequence[Generation]) -> list[Recovery]:
    """One for each generation that is not the start of the run."""
    found: list[Recovery] = []
    # Since the newest generation that brought a new step, or was stopped as planned.
    tries, began_s = list[Recovery](), math.inf
    for before, now in zip([None, *generations], generations, strict=False):
        if before is not None and (before.new_step or before.gap == STOP):
            tries, began_s = [], math.inf
        if now.cause in ("start", REHEARSAL):
            continue
        restored, new_step = last(now.own, kinds.Restored), now.new_step
        workers = of_kind(now.own, kinds.WorkerStarted)
        fault_s, end_s = _fault(before)
        gone_s = before.ends_s if before is not None and before.gap == DOWN else now.begins_s
        begin_s = now.begins_s if fault_s is None else fault_s
        began_s = min(began_s, begin_s)
        marks = [begin_s, end_s, gone_s, now.begins_s, _time(restored), _time(new_step)]
        one = Recovery(
            cause=now.cause,
            lost_steps=restored.event.lost_steps if restored else 0,
            source=restored.event.source if restored else None,
            **dict(zip([f"{phase}_s" for phase in PHASES], _phases_s(marks), strict=True)),
            total_s=max(mark for mark in marks if mark is not None) - began_s if new_step else None,
            standby=bool(workers) and all(each.event.standby for each in workers),
            tries=len(tries) + 1,
            generation=now.generation,
            step=new_step.event.step if new_step else None,
            ended_s=_time(new_step),
            why=now.why,
            line="",
        )
        tries.append(one)
        found.append(replace(one, line=_line(tries)) if new_step else one)
    return found


def _line(tries: Sequence[Recovery]) -> str:
    """tries: the last one has brought a new step."""
    lost_steps, down_s = sum(each.lost_steps for each in tries), sum(each.down_s or 0.0 for each in tries)
    down = f" (for {down_s:.2f} s of it no node answered)" if down_s else ""
    number = f" in {len(tries)} tries" if len(tries) > 1 else ""
    standby = " with standby workers" if tries[-1].standby else ""
    return (
        f"back at step {tries[-1].step} after {tries[-1].total_s:.2f} s{standby}{down}{number}: {tries[0].why},"
        f" {lost_steps} step{'' if lost_steps == 1 else 's'} lost"
    )


def _phases_s(marks: list[float | None]) -> list[float | None]:
    """The time between neighbouring marks; None if one of the two is unknown.

    A mark of a node whose clock is a little behind may be earlier than one before it, and counts as
    simultaneous: so no phase is negative, and the phases add up.
    """
    latest = accumulate((-math.inf if mark is None else mark for mark in marks), max)
    ordered = [None if mark is None else reached for mark, reached in zip(marks, latest, strict=True)]
    return [None if a is None or b is None else b - a for a, b in pairwise(ordered)]


def _fault(of: Generation | None) -> tuple[float | None, float | None]:
    """(when a generation's fault first showed, when its end was noticed), from its `own` events.

    None if no event tells. Of a planned stop both are None: then the clock starts with the
    generation that resumes, since how long the run lay still depends on the user, and says nothing
    about the recovery. The candidates for the first sign are:

    - What happened to a worker, and the request of a drain, at their own times.
    - A hang, at the time of the last progress before it: the run has stood still since then, and
      not only since the agent's patience ended.
    - A fault that a plan injected, if the generation did not survive it. It comes before the signs
      that it causes, and an injected pause has no other sign. Only the newest one counts: each
      earlier one had its own consequences, or none.
    - If there is none of these before the end was noticed, a node fell silent, with its machine or
      its network, or all nodes did. Nothing shows that but the missing steps. The group has stood
      still since the last step before, because each step needs every node.
    """
    if of is None or of.gap == STOP:
        return None, None
    noticed_s, times_s = _time(first(of.own, kinds.GenerationEnded)), of.step_times_s
    signs = [
        each.time - (each.event.silence_s if isinstance(each.event, kinds.HangDetected) else 0.0)
        for each in of.own
        if isinstance(each.event, SIGNS)
    ]
    if noticed_s is not None and min(signs) >= noticed_s:
        signs.append(max((time for time in times_s if time <= noticed_s), default=noticed_s))
    injected = [
        each.time
        for each in of_kind(of.own, kinds.FaultInjected)
        if sum(time > each.time for time in times_s) <= _STEPS_AFTER_A_FAULT
    ]
    return min(injected[-1:] + signs, default=max(times_s, default=None)), noticed_s


def _time(event: LoggedEvent[kinds.Event] | None) -> float | None:
    return None if event is None else event.time
