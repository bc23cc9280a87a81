"""What one agent serves at `--http`: /metrics, /healthz and /readyz.

/healthz is well as long as the agent's loop turns, and while the agent starts and ends. /readyz is
well while this node is in a generation. Each scrape reads on in the run's files, in a thread of its
own: the run's series are there once those were read to their end, since counters that rise while an
old run is read would look like news. They are missing where the files cannot be read: no value is
better than a stale one.

docs/metrics.md says which series may be added up. A name that ends in `_total`, and a histogram,
belongs to numbers that never fall: a step and a recovery count when they are first seen. What may
fall, because the run goes back and a second in a step becomes a lost one, is a gauge.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from importlib.metadata import version
from math import nan
from pathlib import Path
from typing import Any

from prometheus_client import ProcessCollector, core, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from elastic.agent.parts import STANDS_STILL_S, AgentParts
from elastic.config.options import ListenAddress
from elastic.observe.generations import DOWN
from elastic.observe.goodput import BETWEEN_STEPS, END
from elastic.observe.recovery import PHASES
from elastic.observe.run_view import RunView, view_of
from elastic.observe.step_columns import known
from elastic.report.http_server import Answer, HttpServer
from elastic.report.monitors import RankZeroReader
from elastic.system.untrusted import finite

_WAIT_S = 5.0
_VERSION = {"version": version("elastic-train")}
disable_created_metrics()  # type: ignore[no-untyped-call] # when a counter was made says when this process began, and no more

# Each has its counter from the start: a counter that begins with 1 has no increase.
CAUSES = ("failure", "node lost", "node joined", "node left", "resume", "ranks differed")
DURATION_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
RECOVERY_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

# A class of families, the name, what the series says, its value, None for no series, and the names
# of its own labels; where it has some, the value is a dict by their values.
Figure = tuple[Any, ...]


def family(labels: Mapping[str, str], figure: Figure) -> core.Metric:
    """labels: of every series."""
    kind, name, text, value, *own = figure
    found: core.Metric = kind(f"elastic_{name}", text, labels=[*labels, *own])
    add: Any = found
    for values, sample in value.items() if own else (((), value),):
        add.add_metric([*labels.values(), *values], *(sample if isinstance(sample, tuple) else (sample,)))
    return found


def _run_figures(view: RunView) -> Iterator[Figure]:
    counter, gauge = core.CounterMetricFamily, core.GaugeMetricFamily
    yield counter, "steps", "Steps that were trained, each once.", view.highest_step
    yield counter, "lost_steps", "Steps that were lost and had to be done again.", view.lost_steps
    yield gauge, "last_step", "The step with which the run ends.", view.length
    if newest := view.newest:
        loss = finite(newest.loss)
        yield gauge, "step", "The newest step that counts.", newest.step
        yield gauge, "epoch", "The epoch of the newest step, from 0.", newest.epoch
        yield gauge, "step_timestamp_seconds", "When the newest step ended.", newest.time
        text = "The loss of that step; NaN where it was not finite."
        yield gauge, "loss", text, nan if loss is None else loss
    if spent := view.time:
        yield gauge, "goodput_ratio", "Share of time in steps that count.", spent.goodput
        yield gauge, "run_duration_seconds", "Time of the run, without planned pauses.", spent.wall_s
        yield gauge, "useful_seconds", "Time in steps that count.", spent.useful_s
        lost_s = dict.fromkeys(["start", *CAUSES, BETWEEN_STEPS, DOWN, END], 0.0) | spent.badput_s
        by_kind = {(kind,): seconds for kind, seconds in lost_s.items()}
        yield gauge, "badput_seconds", "The other time, by what it went to.", by_kind, "kind"
    if saved := view.checkpoints.newest:
        yield gauge, "checkpoint_timestamp_seconds", "When the newest one was committed.", saved.time
        yield gauge, "checkpoint_step", "The step of the newest checkpoint.", saved.event.step
        yield gauge, "checkpoint_size_bytes", "The size of the newest checkpoint.", saved.event.size_bytes
    if view.generations:
        yield gauge, "generation", "Number of the newest generation.", view.generations[-1].generation
        yield gauge, "world_size", "Workers in it.", view.generations[-1].world_size
        yield gauge, "nodes", "Nodes in it.", len(view.generations[-1].nodes)
        yield gauge, "restarts", "Restarts in a row without a new step.", view.restarts
    saves = view.checkpoints
    text, took = "Time of the saves that were committed.", (saves.committed, sum(saves.saving_s))
    yield core.SummaryMetricFamily, "checkpoint_duration_seconds", text, took
    results = {("committed",): saves.committed, ("failed",): saves.failed, ("fenced",): saves.fenced}
    yield counter, "checkpoints", "Saves, by their result.", results, "result"
    compared = {
        (kind, result): number
        for kind, done in (("rehearsal", view.rehearsals), ("overlap", view.overlaps))
        for result, number in (("alike", done.alike), ("differed", done.count - done.alike))
    }
    text = "Steps that other workers did a second time."
    yield counter, "compared_steps", text, compared, "kind", "result"
    shares = {(str(each.rank), each.node): each.share for each in view.slow_now}
    text = "The share of this generation's time that the other ranks waited for this one."
    # `node` is the agent that exports it.
    yield gauge, "slow_rank_ratio", text, shares, "rank", "slow_node"


class RunSeries:
    """labels: of every series. about: of `elastic_run_info` beside them."""

    def __init__(self, labels: Mapping[str, str], about: Mapping[str, str]) -> None:
        def histogram(name: str, text: str, bounds_s: tuple[float, ...], *own: str) -> core.Histogram:
            return core.Histogram(f"elastic_{name}", text, [*labels, *own], registry=None, buckets=bounds_s)

        self._labels, self._about = dict(labels), dict(about)
        # Steps and recoveries count as each was first seen. A histogram has its buckets of the
        # causes that occurred alone: those of all would be most of a scrape.
        self._steps = histogram("step_duration_seconds", "Time of the steps that count.", DURATION_BOUNDS_S)
        text = "Time from a fault to the end of the first new step."
        self._took = histogram("recovery_duration_seconds", text, RECOVERY_BOUNDS_S, "cause")
        text = "The parts of that time."
        self._phases = histogram("recovery_phase_duration_seconds", text, RECOVERY_BOUNDS_S, "cause", "phase")
        text = "Recoveries that reached a new step, by the cause of their generation."
        self._recoveries = core.Counter("elastic_recoveries", text, [*labels, "cause"], registry=None)
        for cause in CAUSES:
            self._recoveries.labels(*labels.values(), cause)
        self._recovered = set[int]()  # generations
        self._highest = 0  # step

    def families(self, view: RunView) -> list[core.Metric]:
        self._count(view)
        info = core.InfoMetricFamily, "run", "The run and its exporter.", self._about
        counted = self._steps, self._took, self._phases, self._recoveries
        return [
            *(family(self._labels, each) for each in (info, *_run_figures(view)) if each[3] is not None),
            *(metric for each in counted for metric in each.collect()),
        ]

    def _count(self, view: RunView) -> None:
        values, steps = tuple(self._labels.values()), view.steps
        durations = self._steps.labels(*values)
        for seconds in known(steps.seconds[steps.step > self._highest]).tolist():
            durations.observe(seconds)
        self._highest = max(self._highest, int(steps.step.max(initial=0)))
        for each in view.recoveries:
            if each.step is None or each.generation in self._recovered:  # it goes on, or was counted
                continue
            self._recovered.add(each.generation)
            self._recoveries.labels(*values, each.cause).inc()
            if each.total_s is not None:
                self._took.labels(*values, each.cause).observe(each.total_s)
            for phase in PHASES:
                if (seconds := getattr(each, f"{phase}_s")) is not None:
                    self._phases.labels(*values, each.cause, phase).observe(seconds)


class AgentPages(Collector):
    _labels: dict[str, str]
    _run: RankZeroReader
    _series: RunSeries

    def __init__(self, address: ListenAddress) -> None:
        """Listens from now on. Raises UsageError."""
        self._parts: AgentParts | None = None
        self._reading = threading.Lock()
        self._registry = core.CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        pages = {"/metrics": self._metrics, "/healthz": self._healthz, "/readyz": self._readyz}
        self._server = HttpServer(address, pages)
        self.address = self._server.address

    def start(self, parts: AgentParts) -> None:
        settings = parts.settings
        self._labels = {"run": settings.uid, "node": settings.node}
        about = {"recipe": Path(settings.options.recipe).name, "run_id": settings.run_id} | _VERSION
        self._run, self._series = RankZeroReader(parts), RunSeries(self._labels, about)
        self._parts = parts

    def stop(self) -> None:
        self._server.stop()

    def collect(self) -> Iterable[core.Metric]:
        if self._parts is not None:
            yield from (family(self._labels, each) for each in agent_figures(self._parts))
            # A disk that does not answer holds up one scrape, and the others not for long.
            if self._reading.acquire(timeout=_WAIT_S):
                try:
                    yield from self._of_run(self._parts)
                finally:
                    self._reading.release()

    def _of_run(self, parts: AgentParts) -> Iterable[core.Metric]:
        try:
            if (reader := self._run.opened()) is None:
                return []
            return self._series.families(view_of(reader.read(), {parts.settings.node: 0.0}))
        # What no one has thought of, in files that other nodes write, must not hide the agent.
        except Exception as error:
            self._run.failed("the run's series are not served", error)
            return []

    def _metrics(self, accept: str) -> Answer:
        encode, content_type = choose_encoder(accept)
        return Answer(body=encode(self._registry), content_type=content_type)

    def _healthz(self, _accept: str) -> Answer:
        health = None if self._parts is None else self._parts.health
        if health is None:
            return Answer(body=b"ok: the agent starts\n")
        if health.still_s < STANDS_STILL_S:
            return Answer(body=b"ok: the agent's loop turns\n")
        text = f"the agent's loop has stood still for {health.still_s:.0f} s\n"
        return Answer(status=HTTPStatus.SERVICE_UNAVAILABLE, body=text.encode())

    def _readyz(self, _accept: str) -> Answer:
        generation = None if self._parts is None else self._parts.health.generation
        if generation is None:
            return Answer(status=HTTPStatus.SERVICE_UNAVAILABLE, body=b"this node is in no generation\n")
        return Answer(body=f"ok: generation {generation}\n".encode())


def agent_figures(parts: AgentParts) -> Iterable[Figure]:
    """The numbers of this node alone."""
    gauge, health = core.GaugeMetricFamily, parts.health
    is_in, number = health.generation is not None, health.generation or 0
    yield core.InfoMetricFamily, "agent", "The agent of a node.", _VERSION
    yield gauge, "agent_in_generation", "Whether the node is in a generation.", float(is_in)
    yield gauge, "agent_generation", "The generation that the node is in; 0 for none.", number
    text = "Whether the node has the run's rank 0, and exports the run's series."
    yield gauge, "agent_has_rank_zero", text, float(parts.group.is_first)
    yield gauge, "agent_workers", "Workers that the node has in a generation.", parts.settings.nproc
    text = "The newest step that a worker of the node finished in this generation."
    yield gauge, "agent_step", text, parts.step
    yield gauge, "agent_loop_age_seconds", "Time since the agent's loop turned last.", health.still_s
