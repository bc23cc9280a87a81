"""The series of a run in Prometheus' families. docs/metrics.md says which of them may be added up.

A name that ends in `_total`, and a histogram, belongs to numbers that never fall: a step and a
recovery count when they are first seen. What may fall, because the run goes back and a second in a
step becomes a lost one, is a gauge.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from math import nan
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from elastic.observe.goodput import BETWEEN_STEPS, DOWN, END
from elastic.observe.recovery import PHASES, Recovery
from elastic.observe.run_view import RunView
from elastic.observe.step_columns import DURATION_BOUNDS_S
from elastic.system.untrusted import finite

# Each has its counter from the start: a counter that begins with 1 has no increase.
CAUSES = ("failure", "node lost", "node joined", "node left", "resume", "ranks differed")
RECOVERY_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

_Values = Iterable[tuple[tuple[str, ...], float]]  # the values of the labels, and the number


def encoder_for(accept: str) -> tuple[Callable[[Any], bytes], str]:
    """What writes families of a registry as a client takes them, and their type. accept: the header
    of its request.
    """
    with suppress(TypeError):  # a version that is no number, which the library compares with one
        return choose_encoder(accept)
    return choose_encoder("")


class RunSeries:
    """labels: of every series. about: of `elastic_run_info` beside them."""

    def __init__(self, labels: Mapping[str, str], about: Mapping[str, str]) -> None:
        self._names, self._values, self._about = [*labels], [*labels.values()], dict(about)
        self._recovered: dict[int, Recovery] = {}  # by generation, as each was first seen

    def families(self, view: RunView) -> list[Metric]:
        info = InfoMetricFamily("elastic_run", "The run, and the agent that exports it.", labels=self._names)
        info.add_metric(self._values, self._about)
        parts = (self._steps, self._newest, self._time, self._recoveries, self._checkpoints, self._group)
        return [info, *(family for part in parts for family in part(view))]

    def text(self, view: RunView, accept: str) -> tuple[bytes, str]:
        """(what a scrape of these alone is answered with, its type)."""
        encode, content_type = encoder_for(accept)
        registry = CollectorRegistry()
        registry.register(_Collected(self.families(view)))
        return encode(registry), content_type

    def _steps(self, view: RunView) -> Iterator[Metric]:
        durations = view.durations
        yield self._counter(
            "elastic_steps",
            "Steps that were trained, each once, however often it was done.",
            view.highest_step,
        )
        yield self._counter(
            "elastic_lost_steps", "Steps that were lost and had to be done again.", view.lost_steps
        )
        yield self._histograms(
            "elastic_step_duration_seconds",
            "Time of the steps that count.",
            (),
            [((), DURATION_BOUNDS_S, durations.counts, durations.seconds)],
        )
        done = {"rehearsal": view.rehearsals, "overlap": view.overlaps}
        yield self._counters(
            "elastic_compared_steps",
            "Steps that other workers did a second time.",
            ("kind", "result"),
            [
                ((kind, result), count)
                for kind, each in done.items()
                for result, count in (("alike", each.alike), ("differed", each.count - each.alike))
            ],
        )
        if view.length is not None:
            yield self._gauge("elastic_last_step", "The step with which the run ends.", view.length)

    def _newest(self, view: RunView) -> Iterator[Metric]:
        newest = view.newest
        if newest is None:
            return
        loss = finite(newest.loss)
        yield self._gauge("elastic_step", "The newest step that counts.", newest.step)
        yield self._gauge("elastic_epoch", "The epoch of the newest step, from 0.", newest.epoch)
        if newest.time is not None:
            yield self._gauge("elastic_step_timestamp_seconds", "When the newest step ended.", newest.time)
        yield self._gauge(
            "elastic_loss",
            "The loss of the newest step; NaN where it was not finite.",
            nan if loss is None else loss,
        )

    def _time(self, view: RunView) -> Iterator[Metric]:
        spent = view.time
        if spent is None:
            return
        if spent.goodput is not None:
            yield self._gauge(
                "elastic_goodput_ratio",
                "Share of the run's time that went into steps that count.",
                spent.goodput,
            )
        yield self._gauge(
            "elastic_run_duration_seconds", "Time of the run until now, without planned pauses.", spent.wall_s
        )
        yield self._gauge("elastic_useful_seconds", "Time in steps that count.", spent.useful_s)
        kinds = dict.fromkeys(["start", *CAUSES, BETWEEN_STEPS, DOWN, END], 0.0) | spent.badput_s
        yield self._gauges(
            "elastic_badput_seconds", "The other time, by what it went to.", ("kind",), _by_label(kinds)
        )

    def _recoveries(self, view: RunView) -> Iterator[Metric]:
        """Histograms of causes that occurred alone: buckets of all would be most of a scrape."""
        for each in view.recoveries:
            if each.step is not None:  # it is over
                self._recovered.setdefault(each.generation, each)
        found = [*self._recovered.values()]
        counts = dict.fromkeys(CAUSES, 0) | Counter(each.cause for each in found)
        yield self._counters(
            "elastic_recoveries",
            "Recoveries that reached a new step, by the cause of their generation.",
            ("cause",),
            _by_label(counts),
        )
        took_s: dict[tuple[str, ...], list[float]] = {}
        phase_s: dict[tuple[str, ...], list[float]] = {}
        for each in found:
            if each.total_s is not None:
                took_s.setdefault((each.cause,), []).append(each.total_s)
            for phase in PHASES:
                if (seconds := getattr(each, f"{phase}_s")) is not None:
                    phase_s.setdefault((each.cause, phase), []).append(seconds)
        for name, text, labels, of_labels in (
            ("duration", "Time from a fault to the end of the first new step.", ("cause",), took_s),
            ("phase_duration", "The parts of that time.", ("cause", "phase"), phase_s),
        ):
            yield self._histograms(
                f"elastic_recovery_{name}_seconds",
                text,
                labels,
                [
                    (own, RECOVERY_BOUNDS_S, _counts(RECOVERY_BOUNDS_S, values), sum(values))
                    for own, values in of_labels.items()
                ],
            )

    def _checkpoints(self, view: RunView) -> Iterator[Metric]:
        saved = view.checkpoints
        results = {"committed": saved.committed, "failed": saved.failed, "fenced": saved.fenced}
        yield self._counters(
            "elastic_checkpoints", "Saves, by their result.", ("result",), _by_label(results)
        )
        took = SummaryMetricFamily(
            "elastic_checkpoint_duration_seconds",
            "Time of the saves that were committed.",
            labels=self._names,
        )
        took.add_metric(self._values, saved.committed, sum(saved.saving_s))
        yield took
        if saved.newest is not None:
            for name, value in (
                ("timestamp_seconds", saved.newest.time),
                ("step", saved.newest.step),
                ("size_bytes", saved.newest.size_bytes),
            ):
                yield self._gauge(f"elastic_checkpoint_{name}", "Of the newest checkpoint.", value)

    def _group(self, view: RunView) -> Iterator[Metric]:
        if view.generations:
            newest = view.generations[-1]
            yield self._gauge("elastic_generation", "Number of the newest generation.", newest.generation)
            yield self._gauge("elastic_world_size", "Workers in it.", newest.world_size)
            yield self._gauge("elastic_nodes", "Nodes in it.", len(newest.nodes))
            yield self._gauge("elastic_restarts", "Restarts in a row without a new step.", view.restarts)
        yield self._gauges(
            "elastic_slow_rank_ratio",
            "The share of this generation's time that the other ranks waited for this one.",
            ("rank", "slow_node"),  # `node` is the agent that exports it
            [((str(each.rank), each.node), each.share) for each in view.slow_now],
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._gauges(name, text, (), [((), value)])

    def _gauges(self, name: str, text: str, more: tuple[str, ...], values: _Values) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=[*self._names, *more]), values)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._counters(name, text, (), [((), value)])

    def _counters(self, name: str, text: str, more: tuple[str, ...], values: _Values) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=[*self._names, *more]), values)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: _Values) -> Metric:
        for own, value in values:
            family.add_metric([*self._values, *own], value)
        return family

    def _histograms(
        self,
        name: str,
        text: str,
        more: tuple[str, ...],
        found: Iterable[tuple[tuple[str, ...], Sequence[float], Sequence[int], float]],
    ) -> Metric:
        """found: values of the labels, upper bounds, how many in each bucket, and their sum."""
        family = HistogramMetricFamily(name, text, labels=[*self._names, *more])
        for own, bounds, counts, total in found:
            buckets = zip([*map(str, bounds), "+Inf"], map(float, accumulate(counts)), strict=True)
            family.add_metric([*self._values, *own], [*buckets], total)
        return family


class _Collected(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _by_label(values: Mapping[str, float]) -> _Values:
    return [((label,), value) for label, value in values.items()]


def _counts(bounds: Sequence[float], values: Iterable[float]) -> list[int]:
    found = Counter(bisect_left(bounds, value) for value in values)
    return [found[place] for place in range(len(bounds) + 1)]
