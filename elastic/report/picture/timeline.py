"""Who was in which generation, when it trained, and what happened meanwhile.

All of a run is worked out once, and then as much of it is drawn as there is room for: so no figure
depends on what is drawn.
"""

from dataclasses import dataclass, replace

from elastic import events as kinds
from elastic.observe.generation_end import last_seen_s, last_sign_s
from elastic.observe.logged_event import Events, in_generation, of_kind
from elastic.observe.step_columns import StepColumns
from elastic.report.picture.generations import LEFT_OUT, Generation, generations_of, since
from elastic.report.picture.lanes import Lane, among, chosen, lanes_of
from elastic.report.picture.limits import Limits
from elastic.report.picture.marks import Mark, all_gone, both_ends, marks_of
from elastic.report.picture.words import short
from elastic.report.report import Report

MOST_LANES = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTimeline:
    """Of a run of any length. began: seconds since 1970. ends: seconds after that.

    marks: their lanes are indices of `lanes`.
    """

    began: float
    ends: float
    generations: list[Generation]
    lanes: list[Lane]
    marks: list[Mark]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """began: seconds since 1970. ends: seconds after that.

    num_generations, num_machines: of the run. lanes_left_out, generations_left_out,
    marks_left_out: how many have no room. Of generations and marks these are the ones in the
    middle, of lanes those with the fewest faults, and then with the shortest presence.
    """

    began: float
    ends: float
    num_generations: int
    num_machines: int
    generations: list[Generation]
    generations_left_out: int
    lanes: list[Lane]
    lanes_left_out: int
    marks: list[Mark]
    marks_left_out: int


def whole_timeline(
    events: Events, trained: StepColumns, report: Report, *, now_s: float | None, interrupted: bool
) -> WholeTimeline | None:
    """None before the first generation. now_s: where the run goes on, seconds since 1970.

    interrupted: whether its nodes are gone, and none was asked to leave.
    """
    starts = of_kind(events, kinds.GenerationStarted)
    if not starts:
        return None
    began = starts[0].time
    # As in goodput.py: a node that left early may write its last event after the others' end.
    newest = starts[-1]
    seen_s = {newest.generation: last_seen_s(in_generation(events, newest.generation))}
    last_s = last_sign_s(newest, trained.counted.get(newest.generation), seen_s)
    ends_s = max(last_s, now_s or began)
    generations = generations_of(events, trained, report, ends_s)
    lanes, lane_of = lanes_of(starts)
    marks = [*marks_of(events, began, lane_of), *all_gone(generations, events, interrupted=interrupted)]
    return WholeTimeline(
        began=began,
        ends=since(began, ends_s),
        generations=generations,
        lanes=lanes,
        marks=sorted(
            (replace(mark, at=min(mark.at, since(began, ends_s))) for mark in marks), key=lambda mark: mark.at
        ),
    )


def within(whole: WholeTimeline, limits: Limits) -> Timeline:
    """As much of it as there is room for."""
    kept = chosen(whole.lanes, whole.marks, MOST_LANES)
    marks, marks_left_out = both_ends(whole.marks, limits.marks)
    shown, left_out = both_ends(whole.generations, limits.generations)
    first = len(shown) // 2
    if left_out:
        shown[first - 1] = replace(shown[first - 1], gap=LEFT_OUT)
    return Timeline(
        began=whole.began,
        ends=whole.ends,
        num_generations=len(whole.generations),
        num_machines=len(whole.lanes),
        generations=shown,
        generations_left_out=left_out,
        lanes=[among(whole.lanes[at], first, left_out) for at in kept],
        lanes_left_out=len(whole.lanes) - len(kept),
        marks=[_placed(mark, whole.lanes, kept) for mark in marks],
        marks_left_out=marks_left_out,
    )


def _placed(mark: Mark, lanes: list[Lane], kept: list[int]) -> Mark:
    """In its lane among those that are shown; one without it names its machine."""
    if mark.lane is None:
        return mark
    if mark.lane in kept:
        return replace(mark, lane=kept.index(mark.lane))
    return replace(mark, lane=None, text=short(f"{lanes[mark.lane].name}: {mark.text}"))
