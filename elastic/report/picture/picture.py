"""A picture is all that the page shows of a run: one JSON document of bounded size.

It follows from events, metrics, report and status alone. Texts of a run are foreign: they are cut
here, and escaped where they are shown (page.py, static/).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from elastic import events as kinds
from elastic.observe.goodput import time_spent
from elastic.observe.logged_event import Events, last
from elastic.observe.step_columns import StepColumns
from elastic.report.diff import Difference
from elastic.report.picture.checkpoints import Checkpoints, checkpoints
from elastic.report.picture.headline import headline, time_went_to
from elastic.report.picture.series import RunSeries, Series
from elastic.report.picture.slow_ranks import SlowRankShare, slow_ranks
from elastic.report.picture.timeline import Timeline, timeline
from elastic.report.picture.words import short, shortened_at_front
from elastic.report.report import Report
from elastic.report.status import Status

_MOST_TRACEBACK = 6000  # letters
_MOST_CAUSES = 16
_MOST_FACT = 600  # letters of each


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRun:
    """What its files say of a run, and what follows from that. trained, series: what counts of the
    lines of metrics. now_s: where the run goes on, seconds since 1970.

    facts: what the tables of `report` say, by label.
    """

    name: str
    events: Events
    trained: StepColumns
    series: RunSeries
    now_s: float | None
    report: Report
    status: Status
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """headline, went_to: sentences. wall_s, useful_s, badput_s: as in goodput.py; 0 and empty
    before the first generation. causes: how many generations had each cause.

    logged: the loss and the recipe's values over steps. step_time, slowest, others: seconds, over
    steps; slowest and others are those of the slowest rank and the median of the others, None where
    no step says them. clock: when a step ended, in seconds since the run began. facts: what the
    tables of `report` say. traceback: of the newest worker that failed; empty if the run did not.
    """

    name: str
    state: str
    headline: str
    went_to: str
    wall_s: float
    useful_s: float
    goodput: float | None
    badput_s: dict[str, float]
    causes: dict[str, float]
    lost_steps: int
    timeline: Timeline | None
    logged: list[Series]
    names_left_out: int
    step_time: Series
    slowest: Series | None
    others: Series | None
    clock: Series
    slow_ranks: list[SlowRankShare]
    checkpoints: Checkpoints
    facts: dict[str, str]
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two pictures, A and B, and what `diff` says of the runs."""

    same: bool
    reason: str
    first_difference: int | None
    settings: list[str]
    a: Picture
    b: Picture


def picture(run: ReadRun) -> Picture:
    events, report = run.events, run.report
    spent = time_spent(events, run.trained, run.now_s)
    drawn = timeline(events, run.trained, report)
    began = drawn.began if drawn else 0.0
    logged, names_left_out = run.series.logged()
    return Picture(
        name=short(run.name),
        state=run.status.state,
        headline=headline(run.status, report, spent),
        went_to=time_went_to(report, spent),
        wall_s=spent.wall_s if spent else 0.0,
        useful_s=spent.useful_s if spent else 0.0,
        goodput=report.goodput,
        badput_s=largest(report.badput_s),
        causes=largest(Counter(each.cause for each in report.generations)),
        lost_steps=report.lost_steps,
        timeline=drawn,
        logged=logged,
        names_left_out=names_left_out,
        step_time=run.series.step_time,
        slowest=run.series.slowest,
        others=run.series.others,
        clock=run.series.clock(began),
        slow_ranks=slow_ranks(report),
        checkpoints=checkpoints(events, _pieces(drawn), began),
        facts={short(label): short(text, _MOST_FACT) for label, text in run.facts.items()},
        traceback=_traceback(events, report),
    )


def comparison(difference: Difference, a: Picture, b: Picture) -> Comparison:
    return Comparison(
        same=difference.same,
        reason=short(difference.reason),
        first_difference=difference.first_difference,
        settings=[
            short(f"{each.setting}: {each.a} in A, {each.b} in B") for each in difference.settings[:20]
        ],
        a=a,
        b=b,
    )


def largest(parts: Mapping[str, float]) -> dict[str, float]:
    """The largest first; what is beyond the limit is one part. Causes that are cut may be alike."""
    found: dict[str, float] = defaultdict(float)
    for kind, size in parts.items():
        found[short(kind)] += size
    ranked = sorted(found.items(), key=lambda part: -part[1])
    kept = dict(ranked[:_MOST_CAUSES])
    left_out = sum(size for _, size in ranked[_MOST_CAUSES:])
    return kept | {"other causes": left_out} if left_out else kept


def _pieces(drawn: Timeline | None) -> list[tuple[float, float]]:
    return [(each.begins, each.ends) for each in drawn.generations] if drawn else []


def _traceback(events: Events, report: Report) -> str:
    failed = last(events, kinds.WorkerFailed) if report.failed else None
    return "" if failed is None else shortened_at_front(failed.event.traceback, _MOST_TRACEBACK)
