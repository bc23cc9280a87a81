"""The series of a run, made of its totals. Which of them a dashboard may add up: docs/metrics.md.

A name that ends in `_total` belongs to a number that never falls. What may fall, because the run
goes back and a second in a step becomes a lost one, is a gauge.
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from elastic.monitoring.followed_run import FollowedRun
from elastic.monitoring.run_totals import Histogram, RunTotals
from elastic.observe.generation_end import Start
from elastic.observe.goodput import BETWEEN_STEPS, DOWN, END, TimeSpent, time_spent_in
from elastic.observe.one_clock import ahead_of_generations
from elastic.observe.slow_ranks import SlowRank
from elastic.observe.step_columns import moved
from elastic.observe.step_line import StepLine
from elastic.system.untrusted import finite

# Each has its counter from the start: one that begins with 1 has no increase.
CAUSES = ("failure", "node lost", "node joined", "node left", "resume", "ranks differed")
RESULTS = ("committed", "failed", "fenced")


def run_families(
    run: FollowedRun, *, labels: dict[str, str], about: dict[str, str], now_s: float
) -> list[Metric]:
    """labels: of every series. about: of `elastic_run_info` beside them.

    now_s: seconds since 1970, by this node's clock.
    """
    made = _Families(labels)
    totals, newest = run.totals, run.metrics.newest
    marks = totals.marks()
    steps = moved(run.metrics.generations, ahead_of_generations(marks))
    spent = time_spent_in(marks, steps, totals.seen_s, now_s - totals.ahead().get(run.node, 0.0))
    return [
        *made.info("elastic_run", "The run, and the agent that exports its series.", about),
        *_steps(made, totals, newest),
        *([] if newest is None else _newest_step(made, newest)),
        *([] if spent is None else _time(made, spent)),
        *_recoveries(made, totals),
        *_checkpoints(made, totals),
        *([] if (start := totals.start) is None else _group(made, start, totals)),
        *_slow_ranks(made, totals.slow_ranks),
    ]


def _slow_ranks(made: "_Families", found: Sequence[SlowRank]) -> Iterator[Metric]:
    """No series where no rank is slow."""
    values = [((str(each.rank), each.node), each.share) for each in found]
    yield from made.gauges(
        "elastic_slow_rank_ratio",
        "The share of this generation's time that the other ranks waited for this one.",
        ("rank", "slow_node"),  # `node` is the agent that exports it
        values,
    )


class _Families:
    """Families with the labels that all of them have."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._names, self._values = [*labels], [*labels.values()]

    def info(self, name: str, text: str, values: dict[str, str]) -> Iterator[Metric]:
        family = InfoMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, values)
        yield family

    def gauge(self, name: str, text: str, value: float) -> Iterator[Metric]:
        yield from self.gauges(name, text, (), [((), value)])

    def gauges(
        self, name: str, text: str, more: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
    ) -> Iterator[Metric]:
        family = GaugeMetricFamily(name, text, labels=[*self._names, *more])
        for own, value in values:
            family.add_metric([*self._values, *own], value)
        yield family

    def counters(
        self, name: str, text: str, more: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
    ) -> Iterator[Metric]:
        family = CounterMetricFamily(name, text, labels=[*self._names, *more])
        for own, value in values:
            family.add_metric([*self._values, *own], value)
        yield family

    def summary(self, name: str, text: str, count: int, total: float) -> Iterator[Metric]:
        family = SummaryMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, count, total)
        yield family

    def histograms(
        self, name: str, text: str, more: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], Histogram]]
    ) -> Iterator[Metric]:
        family = HistogramMetricFamily(name, text, labels=[*self._names, *more])
        for own, histogram in values:
            family.add_metric([*self._values, *own], _cumulative(histogram), histogram.sum)
        yield family


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        below += count
        found.append((bound, below))
    return found


def _steps(made: _Families, totals: RunTotals, newest: StepLine | None) -> Iterator[Metric]:
    yield from made.counters(
        "elastic_steps",
        "Steps that were trained, each once, however often it was done.",
        (),
        [((), totals.steps)],
    )
    yield from made.counters(
        "elastic_lost_steps", "Steps that were lost and had to be done again.", (), [((), totals.lost_steps)]
    )
    yield from made.histograms(
        "elastic_step_duration_seconds", "Time of the steps that count.", (), [((), totals.step_time)]
    )
    if totals.started is not None:
        yield from made.gauge(
            "elastic_last_step", "The step with which the run ends.", totals.started.event.steps
        )


def _newest_step(made: _Families, newest: StepLine) -> Iterator[Metric]:
    yield from made.gauge("elastic_step", "The newest step that counts.", newest.step)
    yield from made.gauge("elastic_epoch", "The epoch of the newest step, from 0.", newest.epoch)
    if newest.time is not None:
        yield from made.gauge("elastic_step_timestamp_seconds", "When the newest step ended.", newest.time)
    loss = finite(newest.loss)
    yield from made.gauge(
        "elastic_loss",
        "The loss of the newest step; NaN where it was not finite.",
        float("nan") if loss is None else loss,
    )


def _time(made: _Families, spent: TimeSpent) -> Iterator[Metric]:
    if spent.goodput is not None:
        yield from made.gauge(
            "elastic_goodput_ratio", "Share of the run's time that went into steps that count.", spent.goodput
        )
    yield from made.gauge(
        "elastic_run_duration_seconds",
        "Time of the run until now, without planned pauses.",
        spent.wall_s,
    )
    yield from made.gauge("elastic_useful_seconds", "Time in steps that count.", spent.useful_s)
    kinds = dict.fromkeys(["start", *CAUSES, BETWEEN_STEPS, DOWN, END], 0.0) | spent.badput_s
    yield from made.gauges(
        "elastic_badput_seconds",
        "The other time, by what it went to.",
        ("kind",),
        (((kind,), seconds) for kind, seconds in kinds.items()),
    )


def _recoveries(made: _Families, totals: RunTotals) -> Iterator[Metric]:
    counts = dict.fromkeys(CAUSES, 0)
    for each in totals.recovered:
        counts[each.recovery.cause] = counts.get(each.recovery.cause, 0) + 1
    yield from made.counters(
        "elastic_recoveries",
        "Recoveries that reached a new step, by the cause of their generation.",
        ("cause",),
        (((cause,), count) for cause, count in counts.items()),
    )
    # Of causes that occurred alone: buckets of all would be most of what a scrape carries.
    yield from made.histograms(
        "elastic_recovery_duration_seconds",
        "Time from a fault to the end of the first new step.",
        ("cause",),
        (((cause,), histogram) for cause, histogram in totals.recovery_time.items()),
    )
    yield from made.histograms(
        "elastic_recovery_phase_duration_seconds",
        "The parts of that time.",
        ("cause", "phase"),
        totals.phase_time.items(),
    )


def _checkpoints(made: _Families, totals: RunTotals) -> Iterator[Metric]:
    yield from made.counters(
        "elastic_checkpoints",
        "Saves, by their result.",
        ("result",),
        (((result,), totals.checkpoints[result]) for result in RESULTS),
    )
    yield from made.summary(
        "elastic_checkpoint_duration_seconds",
        "Time of the saves that were committed.",
        totals.checkpoints["committed"],
        totals.saving_s,
    )
    if totals.committed is not None:
        saved = totals.committed
        yield from made.gauge(
            "elastic_checkpoint_timestamp_seconds", "When the newest checkpoint was committed.", saved.time
        )
        yield from made.gauge(
            "elastic_checkpoint_step", "The step of the newest checkpoint.", saved.event.step
        )
        yield from made.gauge(
            "elastic_checkpoint_size_bytes", "Size of the newest checkpoint.", saved.event.size_bytes
        )


def _group(made: _Families, start: Start, totals: RunTotals) -> Iterator[Metric]:
    yield from made.gauge("elastic_generation", "Number of the newest generation.", start.generation)
    yield from made.gauge("elastic_world_size", "Workers in it.", start.event.world_size)
    yield from made.gauge("elastic_nodes", "Nodes in it.", len(start.event.nodes))
    yield from made.gauge("elastic_restarts", "Restarts in a row without a new step.", totals.restarts)
