"""What one agent serves at `--http`: /metrics, /healthz and /readyz.

/healthz is well as long as the agent's loop turns, and while the agent starts and ends. /readyz is
well while this node is in a generation. Each scrape reads on in the run's files, in a thread of its
own: the run's series are there once those were read to their end, since counters that rise while an
old run is read would look like news. They are missing where the files cannot be read: no value is
better than a stale one.
"""

import threading
from collections.abc import Iterable
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from elastic.agent.parts import STANDS_STILL_S, AgentParts
from elastic.config.options import ListenAddress
from elastic.observe.run_view import view_of
from elastic.report.http_server import Answer, HttpServer
from elastic.report.monitors import RankZeroReader
from elastic.report.prometheus import Figure, RunSeries, family

_WAIT_S = 5.0
_VERSION = {"version": version("elastic-train")}
disable_created_metrics()  # type: ignore[no-untyped-call] # when a counter was made says when this process began, and no more


class AgentPages(Collector):
    _labels: dict[str, str]
    _run: RankZeroReader
    _series: RunSeries

    def __init__(self, address: ListenAddress) -> None:
        """Listens from now on. Raises UsageError."""
        self._parts: AgentParts | None = None
        self._reading = threading.Lock()
        self._registry = CollectorRegistry()
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

    def collect(self) -> Iterable[Metric]:
        if self._parts is not None:
            yield from (family(self._labels, each) for each in agent_figures(self._parts))
            # A disk that does not answer holds up one scrape, and the others not for long.
            if self._reading.acquire(timeout=_WAIT_S):
                try:
                    yield from self._of_run(self._parts)
                finally:
                    self._reading.release()

    def _of_run(self, parts: AgentParts) -> Iterable[Metric]:
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
    gauge, health = GaugeMetricFamily, parts.health
    is_in, number = health.generation is not None, health.generation or 0
    yield InfoMetricFamily, "agent", "The agent of a node.", _VERSION
    yield gauge, "agent_in_generation", "Whether the node is in a generation.", float(is_in)
    yield gauge, "agent_generation", "The generation that the node is in; 0 for none.", number
    text = "Whether the node has the run's rank 0, and exports the run's series."
    yield gauge, "agent_has_rank_zero", text, float(parts.group.is_first)
    yield gauge, "agent_workers", "Workers that the node has in a generation.", parts.settings.nproc
    text = "The newest step that a worker of the node finished in this generation."
    yield gauge, "agent_step", text, parts.step
    yield gauge, "agent_loop_age_seconds", "Time since the agent's loop turned last.", health.still_s
