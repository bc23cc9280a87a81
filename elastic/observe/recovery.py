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
from dataclasses import dataclass
from itertools import islice, pairwise

from elastic import events as kinds
from elastic.observe.generations import DOWN, REHEARSAL, STOP, Generation
from elastic.observe.logged_event import Events, LoggedEvent, first, last, of_kind

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
    when that ended, in seconds since 1970; None while there is none. line: all tries in one
    sentence; empty while there is no new step.
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
    line: str = ""


def recoveries(generations: Sequence[Generation]) -> list[Recovery]:
    """One for each generation that is not the start of the run."""
    found: list[Recovery] = []
    begin = 0  # the newest generation that brought a new step, or was stopped as planned
    for place, now in enumerate(generations):
        if place and (generations[place - 1].new_step or generations[place - 1].gap == STOP):
            begin = place - 1
        if now.cause not in ("start", REHEARSAL):
            tries = [each for each in found if each.generation > generations[begin].generation]
            found.append(_recovery(generations[begin : place + 1], tries))
    return found


def _recovery(chain: Sequence[Generation], tries: Sequence[Recovery]) -> Recovery:
    """chain: the generation from which the run went on, those that brought no new step, and the one
    that the recovery led to. tries: the recoveries of those between.
    """
    now, before = chain[-1], chain[-2] if len(chain) > 1 else None
    restored, new_step = last(now.own, kinds.Restored), now.new_step
    fault_s, end_s = (None, None) if before is None else _ended(before)
    gone_s = before.ends_s if before is not None and before.gap == DOWN else now.begins_s
    begin = now.begins_s if fault_s is None else fault_s
    marks = [begin, end_s, gone_s, now.begins_s, _time(restored), _time(new_step)]
    phases_s = dict(zip([f"{phase}_s" for phase in PHASES], _phases_s(marks), strict=True))
    if len(chain) > 2:
        first_fault_s = _ended(chain[0])[0]
        begin = min(begin, chain[1].begins_s if first_fault_s is None else first_fault_s)
    total_s = max(mark for mark in marks if mark is not None) - begin if new_step else None
    lost_steps, line = restored.event.lost_steps if restored else 0, ""
    if new_step is not None:
        all_lost = sum([lost_steps, *(each.lost_steps for each in tries)])
        away_s = sum([phases_s["down_s"] or 0.0, *(each.down_s or 0.0 for each in tries)])
        down = f" (for {away_s:.2f} s of it no node answered)" if away_s else ""
        number = f" in {len(chain) - 1} tries" if len(chain) > 2 else ""
        why = tries[0].why if tries else now.why
        line = (
            f"back at step {new_step.event.step} after {total_s:.2f} s{down}{number}: {why},"
            f" {all_lost} step{'' if all_lost == 1 else 's'} lost"
        )
    return Recovery(
        cause=now.cause,
        lost_steps=lost_steps,
        source=restored.event.source if restored else None,
        **phases_s,
        total_s=total_s,
        tries=max(1, len(chain) - 1),
        generation=now.generation,
        step=new_step.event.step if new_step else None,
        ended_s=_time(new_step),
        why=now.why,
        line=line,
    )


def _ended(before: Generation) -> tuple[float | None, float | None]:
    """As `_fault`, of one generation before another; None and None for a planned stop.

    Then the clock starts with the generation that resumes: how long the run lay still depends on
    the user, and says nothing about the recovery.
    """
    if before.gap == STOP:
        return None, None
    fault_s, noticed_s = _fault(before.own, before.step_times_s)
    if fault_s is None:  # all nodes died without a word
        fault_s = max(before.step_times_s, default=None)
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
