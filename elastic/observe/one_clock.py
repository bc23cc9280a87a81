"""All times of a run are by one clock, that of rank 0's node in its first generation.

An agent and all that it starts read their wall clock once (system/clock.py), so that a node's clock
is wrong by one number. Events of different nodes that belong together show it:

    generation_started, by rank 0's agent ── worker_started, by each agent ── restored, by rank 0

A clock that keeps this order counts as right, since the clocks of a cluster agree better than these
events do. Else the node's first worker counts as started with its generation. A command that is
given again begins no earlier than the last sign of the one before. It does not promise more: a
clock that was set ahead between two commands makes the time between them longer.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from elastic.events import Event, GenerationStarted, Restored, WorkerStarted
from elastic.observe.logged_event import Events, LoggedEvent, by_generation, in_order, of_kind

LAG_S = 5.0  # between agents that see a new generation


def ahead_s(events: Events) -> dict[str, float]:
    """By node, how many seconds its clock is ahead; of nodes that started workers.

    events: at least those of the three kinds, in order.
    """
    found: dict[str, float] = {}
    own, reached = by_generation(events), -math.inf
    for start in of_kind(events, GenerationStarted):
        then = own[start.generation]
        latest = max([LAG_S, *(each.time - start.time for each in of_kind(then, Restored))])
        gaps = {each.node: each.time - start.time for each in reversed(of_kind(then, WorkerStarted))}
        gaps = {node: 0.0 if -LAG_S <= gap <= latest else gap for node, gap in gaps.items()}
        gaps[start.node] = 0.0
        known = (found[node] - gap for node, gap in gaps.items() if node in found)
        of_start = found.get(start.node, next(known, min(0.0, start.time - reached)))
        found = {node: of_start + gap for node, gap in gaps.items()} | found
        reached = max(reached, *(each.time - found[each.node] for each in then if each.node in found))
    return found


def moved(events: Events, ahead: Mapping[str, float]) -> Events:
    """The events with the times of one clock, in order. ahead: as `ahead_s` says."""
    if not any(ahead.values()):
        return events
    found: list[LoggedEvent[Event]] = []
    of_steps = 0.0  # of the node that wrote the steps before
    for each in events:
        by = ahead.get(each.node, 0.0)
        event = each.event
        if isinstance(event, Restored) and event.last_step_s is not None:
            event = replace(event, last_step_s=event.last_step_s - of_steps)
        if isinstance(event, Restored):
            of_steps = by
        found.append(replace(each, time=each.time - by, ahead_s=by, event=event))
    return in_order(found)


def ahead_of_generations(events: Events) -> dict[int, float]:
    """By how much the times of a generation's steps are. events: as `moved` gives them."""
    return {each.generation: each.ahead_s for each in of_kind(events, GenerationStarted)}
