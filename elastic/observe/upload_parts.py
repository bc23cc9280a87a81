"""What many nodes upload in immutable parts is one event log and one file of metrics again.

events/<name>/<offset>.jsonl                     the bytes of events/<name>.jsonl from <offset> on
logs/<generation>/rank<k>/<offset>.log           the same of a worker's log
metrics/<generation>/<first>-<last>-<node>.jsonl the steps <first> to <last> that a generation
trained

Parts hold whole lines and are created exclusively, so an offset belongs to one part only. Lines of
metrics may be uploaded twice, by nodes that keep the same ones: generation and step identify a
line.

It does not promise that nothing is missing: what a node had not uploaded when its machine was lost
is gone.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from elastic.events import Event, Overlapped, Rehearsed, Restored, StepDiffered
from elastic.observe.logged_event import LoggedEvent
from elastic.observe.step_line import StepLine

EVENTS = "events"
LOGS = "logs"
METRICS = "metrics"
_COMPARED = Rehearsed, Overlapped, StepDiffered

_PART = re.compile(r"(?P<stem>.+)/(?P<offset>\d{12})(?P<suffix>\.(?:jsonl|log))")
_METRICS_PART = re.compile(rf"{METRICS}/(?P<generation>\d+)/(?P<first>\d+)-(?P<last>\d+)-.*\.jsonl")


def part_name(source: str, offset: int) -> str:
    """`source`: the path of an appended file inside the run directory."""
    stem, _, suffix = source.rpartition(".")
    return f"{stem}/{offset:012d}.{suffix}"


def uploaded_bytes(sizes: Mapping[str, int]) -> dict[str, int]:
    """How many bytes of each source the store has; `sizes`: bytes of each part, by its name."""
    found: dict[str, int] = {}
    for name, size_bytes in sizes.items():
        if part := _PART.fullmatch(name):
            source = part["stem"] + part["suffix"]
            found[source] = max(found.get(source, 0), int(part["offset"]) + size_bytes)
    return found


def metrics_part_name(generation: int, first: int, last: int, node: str) -> str:
    return f"{METRICS}/{generation:06d}/{first:012d}-{last:012d}-{node}.jsonl"


def uploaded_steps(names: Iterable[str]) -> dict[int, int]:
    """The last step of each generation that the store has a line of, by generation."""
    parts = filter(None, map(_METRICS_PART.fullmatch, names))
    return dict(sorted((int(part["generation"]), int(part["last"])) for part in parts))


def merge(lines: Iterable[StepLine], restored: Mapping[int, int]) -> tuple[list[StepLine], dict[int, int]]:
    """(one line for each step that counts, in order; by generation, the steps it trained again).

    restored: the step of the state that each generation restored.

    A generation replaces all that older ones trained beyond the state that it restored. It does so
    from its restore on, before it has trained a step itself: the lost steps do not count any more.
    If the event of its restore is missing, its first line tells where it began.
    """
    by_generation: dict[int, dict[int, StepLine]] = {generation: {} for generation in restored}
    for line in lines:
        by_generation.setdefault(line.generation, {}).setdefault(line.step, line)
    kept: dict[int, StepLine] = {}
    lost: dict[int, int] = {}
    for generation in sorted(by_generation):
        own = by_generation[generation]
        begin = restored.get(generation, min(own, default=1) - 1)
        lost[generation] = max(0, max(kept, default=0) - begin)
        kept = {step: line for step, line in kept.items() if step <= begin} | own
    return [kept[step] for step in sorted(kept)], lost


def with_losses(events: Sequence[LoggedEvent[Event]], lost: Mapping[int, int]) -> list[LoggedEvent[Event]]:
    """The same events with the lost steps that `merge` found, where they are more.

    Rank 0 counts lost steps by the metrics in its own folder. If it is on another node than the
    rank 0 before, that folder lacks lines, and rank 0 could not know of all steps that were lost. A
    generation that did a step again to compare it has lost none.
    """
    compared = {each.generation for each in events if isinstance(each.event, _COMPARED)}
    found = []
    for each in events:
        event = each.event
        if isinstance(event, Restored) and each.generation not in compared:
            event = replace(event, lost_steps=max(event.lost_steps, lost.get(each.generation, 0)))
        found.append(replace(each, event=event))
    return found
