"""A picture is all that the page shows of a run: one JSON document of bounded size.

It follows from events, metrics, report and status alone. Texts of a run are foreign: they are cut
here, and escaped where they are shown (page.py, static/).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastic import events as kinds
from elastic.observe import goodput
from elastic.observe.logged_event import Events, last, of_kind
from elastic.observe.step_columns import StepColumns
from elastic.report.diff import Difference
from elastic.report.picture.checkpoints import Checkpoints, checkpoints
from elastic.report.picture.checkpoints import within as commits_within
from elastic.report.picture.faults import Faults, faults_of
from elastic.report.picture.headline import headline, time_went_to
from elastic.report.picture.json_text import size_bytes
from elastic.report.picture.limits import Limits
from elastic.report.picture.recoveries import Recoveries, recoveries_of
from elastic.report.picture.series import RunSeries, Series, of_points
from elastic.report.picture.slow_ranks import SlowRankShare, slow_ranks
from elastic.report.picture.timeline import Timeline, WholeTimeline, whole_timeline, within
from elastic.report.picture.words import short, shortened_at_front
from elastic.report.report import Report
from elastic.report.status import Status

MOST_BYTES = 800_000  # the page has the scripts and styles beside it
_OVER = ("failed", "drained", "interrupted")
_MOST_TRACEBACK = 6000  # letters
_MOST_CAUSES = 16
_MOST_NAMES = 10  # of those without a chart
_MOST_FACT = 600  # letters of each, and of what two runs have in common


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
    """headline, went_to: sentences. wall_s, useful_s, badput_s, paused_s: as in goodput.py; 0 and
    empty before the first generation. last_sign_s: of a run that neither goes on nor has finished,
    seconds since 1970. causes: how often each was there.

    logged: the loss and the recipe's values over steps. without_number: the names that have no
    chart, since none of their values is a number. step_time, slowest, others: seconds, over
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
    paused_s: float
    last_sign_s: float | None
    causes: dict[str, float]
    lost_steps: int
    faults: Faults
    recoveries: Recoveries
    timeline: Timeline | None
    logged: list[Series]
    names_left_out: int
    without_number: list[str]
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


def picture(run: ReadRun, most_bytes: int = MOST_BYTES) -> Picture:
    """most_bytes: of the document; what needs the most of it is halved until it fits."""
    found, limits = _whole(run), Limits()
    shown = _within(found, limits)
    while size_bytes(asdict(shown)) > most_bytes and (parts := limits.reducible()):
        sizes = _sizes(shown)
        limits = limits.halved(max(parts, key=lambda part: sizes[part]))
        shown = _within(found, limits)
    return shown


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """figures: a picture without what has a limit of its own."""

    figures: Picture
    series: RunSeries
    timeline: WholeTimeline | None
    checkpoints: Checkpoints


def _whole(run: ReadRun) -> _Whole:
    events, report, state = run.events, run.report, run.status.state
    spent = goodput.time_spent(events, run.trained, run.now_s)
    whole = whole_timeline(events, run.trained, report, now_s=run.now_s, interrupted=state == "interrupted")
    generations = whole.generations if whole else []
    saved = checkpoints(events, [(each.begins, each.ends) for each in generations], _began(whole))
    ended_s = whole.began + whole.ends if whole and state in _OVER else None
    figures = Picture(
        name=short(run.name),
        state=state,
        headline=headline(run.status, report, spent, _since_step_s(run)),
        went_to=time_went_to(report, spent, is_running=state == "running"),
        wall_s=spent.wall_s if spent else 0.0,
        useful_s=spent.useful_s if spent else 0.0,
        goodput=report.goodput,
        badput_s=largest(report.badput_s),
        paused_s=spent.paused_s if spent else 0.0,
        last_sign_s=ended_s,
        causes=largest(spent.times) if spent else {},
        lost_steps=report.lost_steps,
        faults=faults_of(events, generations, run.status),
        recoveries=recoveries_of(events, report),
        timeline=None,
        logged=[],
        names_left_out=0,
        without_number=_some_names(run.series.without_number),
        step_time=of_points("step time", []),
        slowest=None,
        others=None,
        clock=of_points("clock", []),
        slow_ranks=slow_ranks(report),
        checkpoints=saved,
        facts={short(label): short(text, _MOST_FACT) for label, text in run.facts.items()},
        traceback=_traceback(events, report),
    )
    return _Whole(figures=figures, series=run.series, timeline=whole, checkpoints=saved)


def _within(found: _Whole, limits: Limits) -> Picture:
    series, most = found.series, limits.points
    logged, names_left_out = series.logged(most)
    return replace(
        found.figures,
        timeline=within(found.timeline, limits) if found.timeline else None,
        logged=logged,
        names_left_out=names_left_out,
        step_time=series.step_time(most),
        slowest=series.slowest(most),
        others=series.others(most),
        clock=series.clock(_began(found.timeline), most),
        checkpoints=commits_within(found.checkpoints, limits.commits),
    )


def _some_names(names: Sequence[str]) -> list[str]:
    """The first ones, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return [short(name) for name in names[:_MOST_NAMES]] + ([f"{more} more"] if more > 0 else [])


def _sizes(shown: Picture) -> dict[str, int]:
    """Bytes, by the limit that bounds them."""
    drawn = shown.timeline
    points = [*shown.logged, shown.step_time, shown.slowest, shown.others, shown.clock]
    found: dict[str, Sequence[Any]] = {
        "points": [each for each in points if each],
        "generations": [*drawn.generations, *drawn.lanes] if drawn else [],
        "marks": drawn.marks if drawn else [],
    }
    sizes = {part: size_bytes([asdict(each) for each in own]) for part, own in found.items()}
    return sizes | {"commits": size_bytes(shown.checkpoints.commits)}


def _began(whole: WholeTimeline | None) -> float:
    return whole.began if whole else 0.0


def _since_step_s(run: ReadRun) -> float | None:
    """How long a running run has made no step since its command was given; None if it ended."""
    starts = of_kind(run.events, kinds.GenerationStarted)
    given_s = [each.time for each in starts if each.event.cause in ("start", "resume")]
    if run.now_s is None or not starts:
        return None
    return run.now_s - max([starts[0].time, *given_s, run.trained.last_time_s or 0.0])


def comparison(difference: Difference, a: Picture, b: Picture) -> Comparison:
    return Comparison(
        same=difference.same,
        reason=short(difference.reason, _MOST_FACT),
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


def _traceback(events: Events, report: Report) -> str:
    failed = last(events, kinds.WorkerFailed) if report.failed else None
    return "" if failed is None else shortened_at_front(failed.event.traceback, _MOST_TRACEBACK)
