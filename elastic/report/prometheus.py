"""The series of a run in Prometheus' families. docs/metrics.md says which of them may be added up.

A name that ends in `_total`, and a histogram, belongs to numbers that never fall: a step and a
recovery count when they are first seen. What may fall, because the run goes back and a second in a
step becomes a lost one, is a gauge.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import nan
from typing import Any

import numpy as np
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from elastic.observe.generations import DOWN
from elastic.observe.goodput import BETWEEN_STEPS, END
from elastic.observe.recovery import PHASES, Recovery
from elastic.observe.run_view import RunView
from elastic.observe.step_columns import known
from elastic.system.untrusted import finite

# Each has its counter from the start: a counter that begins with 1 has no increase.
CAUSES = ("failure", "node lost", "node joined", "node left", "resume", "ranks differed")
DURATION_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
RECOVERY_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

_Kind = Callable[..., Any]  # a class of families
_Own = tuple[str, ...]  # values of the labels that not every series has
_Samples = Mapping[_Own, tuple[Any, ...]]  # what `add_metric` of the family takes beside them


def _numbers(view: RunView) -> Iterator[tuple[_Kind, str, str, float | None]]:
    """The series without labels: (kind, name, what it says, its value, None for no series)."""
    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    yield counter, "steps", "Steps that were trained, each once.", view.highest_step
    yield counter, "lost_steps", "Steps that were lost and had to be done again.", view.lost_steps
    yield gauge, "last_step", "The step with which the run ends.", view.length
    if newest := view.newest:
        loss = finite(newest.loss)
        yield gauge, "step", "The newest step that counts.", newest.step
        yield gauge, "epoch", "The epoch of the newest step, from 0.", newest.epoch
        yield gauge, "step_timestamp_seconds", "When the newest step ended.", newest.time
        yield (
            gauge,
            "loss",
            "The loss of that step; NaN where it was not finite.",
            nan if loss is None else loss,
        )
    if spent := view.time:
        yield gauge, "goodput_ratio", "Share of time in steps that count.", spent.goodput
        yield gauge, "run_duration_seconds", "Time of the run, without planned pauses.", spent.wall_s
        yield gauge, "useful_seconds", "Time in steps that count.", spent.useful_s
    if saved := view.checkpoints.newest:
        yield gauge, "checkpoint_timestamp_seconds", "When the newest one was committed.", saved.time
        yield gauge, "checkpoint_step", "The step of the newest checkpoint.", saved.event.step
        yield gauge, "checkpoint_size_bytes", "The size of the newest checkpoint.", saved.event.size_bytes
    if view.generations:
        yield gauge, "generation", "Number of the newest generation.", view.generations[-1].generation
        yield gauge, "world_size", "Workers in it.", view.generations[-1].world_size
        yield gauge, "nodes", "Nodes in it.", len(view.generations[-1].nodes)
        yield gauge, "restarts", "Restarts in a row without a new step.", view.restarts


class RunSeries:
    """labels: of every series. about: of `elastic_run_info` beside them."""

    def __init__(self, labels: Mapping[str, str], about: Mapping[str, str]) -> None:
        self._names, self._values, self._about = [*labels], [*labels.values()], dict(about)
        # Steps and recoveries count as each was first seen.
        self._recovered: dict[int, Recovery] = {}  # by generation
        self._durations = np.zeros(len(DURATION_BOUNDS_S) + 1, np.int64)  # by the upper bound
        self._seconds, self._highest = 0.0, 0

    def families(self, view: RunView) -> list[Metric]:
        return [
            self._family(InfoMetricFamily, "run", "The run and its exporter.", {(): (self._about,)}),
            *(
                self._family(kind, name, text, {(): (value,)})
                for kind, name, text, value in _numbers(view)
                if value is not None
            ),
            *self._of_steps(view),
            *self._of_recoveries(view),
            *self._of_checkpoints(view),
        ]

    def _of_steps(self, view: RunView) -> Iterator[Metric]:
        steps = view.steps
        new_s = known(steps.seconds[steps.step > self._highest])
        places = np.searchsorted(DURATION_BOUNDS_S, new_s)
        self._durations += np.bincount(places, minlength=len(self._durations))
        self._seconds += float(new_s.sum())
        self._highest = max(self._highest, int(steps.step.max(initial=0)))
        text, sample = "Time of the steps that count.", _buckets(DURATION_BOUNDS_S, self._durations.tolist())
        yield self._family(
            HistogramMetricFamily, "step_duration_seconds", text, {(): (sample, self._seconds)}
        )
        compared, shares = dict[_Own, tuple[float]](), dict[_Own, tuple[float]]()
        for kind, done in (("rehearsal", view.rehearsals), ("overlap", view.overlaps)):
            compared[kind, "alike"], compared[kind, "differed"] = (done.alike,), (done.count - done.alike,)
        text = "Steps that other workers did a second time."
        yield self._family(CounterMetricFamily, "compared_steps", text, compared, "kind", "result")
        text = "The share of this generation's time that the other ranks waited for this one."
        for each in view.slow_now:
            shares[str(each.rank), each.node] = (each.share,)
        # `node` is the agent that exports it.
        yield self._family(GaugeMetricFamily, "slow_rank_ratio", text, shares, "rank", "slow_node")
        if view.time is not None:
            kinds = dict.fromkeys(["start", *CAUSES, BETWEEN_STEPS, DOWN, END], 0.0) | view.time.badput_s
            text = "The other time, by what it went to."
            yield self._family(GaugeMetricFamily, "badput_seconds", text, _by_label(kinds), "kind")

    def _of_recoveries(self, view: RunView) -> Iterator[Metric]:
        """Histograms of causes that occurred alone: buckets of all would be most of a scrape."""
        for each in view.recoveries:
            if each.step is not None:  # it is over
                self._recovered.setdefault(each.generation, each)
        counts = dict.fromkeys(CAUSES, 0) | Counter(each.cause for each in self._recovered.values())
        text = "Recoveries that reached a new step, by the cause of their generation."
        yield self._family(CounterMetricFamily, "recoveries", text, _by_label(counts), "cause")
        took_s, phases_s = (defaultdict[_Own, list[float]](list) for _ in range(2))
        for each in self._recovered.values():
            if each.total_s is not None:
                took_s[each.cause,].append(each.total_s)
            for phase in PHASES:
                if (seconds := getattr(each, f"{phase}_s")) is not None:
                    phases_s[each.cause, phase].append(seconds)
        text = "Time from a fault to the end of the first new step."
        yield self._histograms("recovery_duration_seconds", text, took_s, "cause")
        text = "The parts of that time."
        yield self._histograms("recovery_phase_duration_seconds", text, phases_s, "cause", "phase")

    def _of_checkpoints(self, view: RunView) -> Iterator[Metric]:
        saved = view.checkpoints
        results = {"committed": saved.committed, "failed": saved.failed, "fenced": saved.fenced}
        text = "Saves, by their result."
        yield self._family(CounterMetricFamily, "checkpoints", text, _by_label(results), "result")
        text, took = "Time of the saves that were committed.", (saved.committed, sum(saved.saving_s))
        yield self._family(SummaryMetricFamily, "checkpoint_duration_seconds", text, {(): took})

    def _histograms(
        self, name: str, text: str, found: Mapping[_Own, Sequence[float]], *labels: str
    ) -> Metric:
        samples = {}
        for own, values in found.items():
            counts = Counter(bisect_left(RECOVERY_BOUNDS_S, value) for value in values)
            each = _buckets(RECOVERY_BOUNDS_S, (counts[place] for place in range(len(RECOVERY_BOUNDS_S) + 1)))
            samples[own] = each, sum(values)
        return self._family(HistogramMetricFamily, name, text, samples, *labels)

    def _family(self, kind: _Kind, name: str, text: str, samples: _Samples, *labels: str) -> Metric:
        """labels: names of those that the samples have beside the labels of every series."""
        family = kind(f"elastic_{name}", text, labels=[*self._names, *labels])
        for own, sample in samples.items():
            family.add_metric([*self._values, *own], *sample)
        found: Metric = family
        return found


def _by_label(values: Mapping[str, float]) -> _Samples:
    return {(label,): (value,) for label, value in values.items()}


def _buckets(bounds: Sequence[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """counts: in each bucket, with one more for those beyond the last bound."""
    return [*zip([*map(str, bounds), "+Inf"], map(float, accumulate(counts)), strict=True)]
