"""What one agent serves at `--http`: /metrics, /healthz and /readyz.

/healthz is well as long as the agent's loop turns, and while the agent starts and ends. /readyz is
well while this node is in a generation. The run's series appear once its files were read to their
end, since counters that rise while an old run is read would look like news. They vanish where the
files cannot be read: no value is better than a stale one.
"""

from collections.abc import Iterable
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from elastic.agent.parts import AgentParts
from elastic.config.options import ListenAddress
from elastic.observe.run_view import RunView
from elastic.observe.step_columns import StepBatch
from elastic.report.follower import Follower
from elastic.report.http_server import Answer, HttpServer, Page, listen
from elastic.report.prometheus import RunSeries
from elastic.system.clock import Clock

_STOP_S = 2.0
_FRESH_S = 60.0
_VERSION = {"version": version("elastic-train")}


class AgentPages(Collector):
    """It is the renderer of its own follower, in turn with others of another rank 0."""

    def __init__(self, address: ListenAddress, clock: Clock) -> None:
        """Listens from now on. Raises UsageError."""
        self._clock = clock
        self._parts: AgentParts | None = None
        self._labels: dict[str, str] = {}
        self._series: RunSeries | None = None
        self._of_run: list[Metric] = []
        self._follower = Follower("run-series", self._open, problem="the run's series are not served")
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        pages: dict[str, Page] = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
        }
        self._server = HttpServer(listen(address), pages)
        self._server.start()

    @property
    def address(self) -> ListenAddress:
        return self._server.address

    def start(self, parts: AgentParts) -> None:
        self._labels = {"run": parts.settings.uid, "node": parts.settings.node}
        self._parts = parts
        self._follower.start(parts)

    def stop(self) -> None:
        self._follower.stop(_STOP_S)
        self._server.stop()

    def add(self, steps: StepBatch) -> None:
        """The view counts them."""

    def show(self, view: RunView) -> None:
        assert self._series is not None
        self._of_run = self._series.families(view)

    def close(self) -> None:
        self._of_run = []

    def _open(self, parts: AgentParts) -> "AgentPages":
        settings = parts.settings
        about = {"recipe": Path(settings.options.recipe).name, "run_id": settings.run_id} | _VERSION
        self._series = RunSeries(self._labels, about)
        return self

    def collect(self) -> Iterable[Metric]:
        if self._parts is not None:
            yield from _agent_families(self._parts, self._labels)
            # A disk that does not answer holds up the follower, and no scrape.
            if self._clock.monotonic() - self._follower.looked_s < _FRESH_S:
                yield from self._of_run

    def _metrics(self, accept: str) -> Answer:
        encode, content_type = choose_encoder(accept)
        return Answer(body=encode(self._registry), content_type=content_type)

    def _healthz(self, _accept: str) -> Answer:
        health = None if self._parts is None else self._parts.health
        if health is None:
            return Answer(body=b"ok: the agent starts\n")
        if health.turns:
            return Answer(body=b"ok: the agent's loop turns\n")
        text = f"the agent's loop has stood still for {health.still_s:.0f} s\n"
        return Answer(status=HTTPStatus.SERVICE_UNAVAILABLE, body=text.encode())

    def _readyz(self, _accept: str) -> Answer:
        generation = None if self._parts is None else self._parts.health.generation
        if generation is None:
            return Answer(status=HTTPStatus.SERVICE_UNAVAILABLE, body=b"this node is in no generation\n")
        return Answer(body=f"ok: generation {generation}\n".encode())


def _agent_families(parts: AgentParts, labels: dict[str, str]) -> Iterable[Metric]:
    """The numbers of this node alone."""
    names, values = [*labels], [*labels.values()]
    health = parts.health
    info = InfoMetricFamily("elastic_agent", "The agent of a node.", labels=names)
    info.add_metric(values, _VERSION)
    yield info
    for name, text, value in (
        ("in_generation", "Whether the node is in a generation.", health.generation is not None),
        ("generation", "The generation that the node is in; 0 for none.", health.generation or 0),
        (
            "has_rank_zero",
            "Whether the node has the run's rank 0, and exports the run's series.",
            parts.group.is_first,
        ),
        ("workers", "Workers that the node has in a generation.", parts.settings.nproc),
        ("step", "The newest step that a worker of the node finished in this generation.", parts.step),
        ("loop_age_seconds", "Time since the agent's loop turned last.", health.still_s),
    ):
        family = GaugeMetricFamily(f"elastic_agent_{name}", text, labels=names)
        family.add_metric(values, float(value))
        yield family
