"""What the recoveries of a run took: figures of all of them, and the longest ones one by one."""

from dataclasses import dataclass, fields
from statistics import median

from elastic import events as kinds
from elastic.observe.generation_end import Start
from elastic.observe.logged_event import Events, by_generation, first, of_kind
from elastic.observe.recovery import Recovery
from elastic.observe.recovery_line import why_ended
from elastic.report.picture.words import short
from elastic.report.report import Report

MOST_RECOVERIES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRecovery(Recovery):
    """generation: the one that it led to. step: its first new one, None if it had none."""

    generation: int
    why: str
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoveries:
    """number, median_s, longest_s: of all. longest: the first of them, the longest first."""

    number: int
    median_s: float | None
    longest_s: float | None
    longest: list[OneRecovery]


def recoveries_of(events: Events, report: Report) -> Recoveries:
    starts, own = of_kind(events, kinds.GenerationStarted), by_generation(events)
    pairs = zip([None, *starts], starts, strict=False)
    # The report has one for each generation that is not the start of the run.
    found = zip((pair for pair in pairs if pair[1].event.cause != "start"), report.recoveries, strict=False)
    ranked = sorted(found, key=lambda each: -_took_s(each[1]))
    totals = [each.total_s for each in report.recoveries if each.total_s is not None]
    return Recoveries(
        number=len(report.recoveries),
        median_s=median(totals) if totals else None,
        longest_s=max(totals, default=None),
        longest=[
            _one(recovery, before, start, own[before.generation] if before else [], own[start.generation])
            for (before, start), recovery in ranked[:MOST_RECOVERIES]
        ],
    )


def _one(recovery: Recovery, before: Start | None, start: Start, then: Events, now: Events) -> OneRecovery:
    """then, now: events of the two generations."""
    step = first(now, kinds.FirstStep)
    source = None if recovery.source is None else short(recovery.source)
    measured = {each.name: getattr(recovery, each.name) for each in fields(Recovery)}
    return OneRecovery(
        **measured | {"cause": short(recovery.cause), "source": source},
        generation=start.generation,
        why=short(recovery.cause if before is None else why_ended(then, before, start)),
        step=None if step is None else step.event.step,
    )


def _took_s(recovery: Recovery) -> float:
    """The total, which is more than the phases where one of their marks is unknown; without a new
    step, the phases that there were.
    """
    if recovery.total_s is not None:
        return recovery.total_s
    phases = (
        recovery.detect_s,
        recovery.rendezvous_s,
        recovery.down_s,
        recovery.restore_s,
        recovery.first_step_s,
    )
    return sum(each for each in phases if each is not None)
