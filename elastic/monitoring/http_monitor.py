"""What one agent serves at `--http`: /metrics, /healthz and /readyz.

/healthz is well as long as the agent's loop turns, and while the agent starts and ends. /readyz is
well while this node is in a generation.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from elastic.agent.actions import AgentParts
from elastic.agent.settings import Settings
from elastic.config.listen_address import ListenAddress
from elastic.monitoring.http_server import Answer, HttpServer, Page, listen
from elastic.monitoring.run_series import RunSeries
from elastic.system.clock import Clock

_UNAVAILABLE = 503
_RENDERING_S = 5.0
_RENDERED_FOR_S = 0.1  # clients that come at once share the work


class HttpMonitor(Collector):
    def __init__(self, address: ListenAddress, clock: Clock) -> None:
        """Listens from now on. Raises UsageError."""
        self._clock = clock
        self._parts: AgentParts | None = None
        self._labels: dict[str, str] = {}
        self._series: RunSeries | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._rendering = threading.Lock()
        self._rendered: dict[str, tuple[float, bytes]] = {}  # by content type: when, and what
        pages: dict[str, Page] = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
        }
        self._server = HttpServer(listen(address), pages, clock)
        self._server.start()

    @property
    def address(self) -> ListenAddress:
        return self._server.address

    def start(self, parts: AgentParts) -> None:
        settings = parts.settings
        self._labels = {"run": settings.uid, "node": settings.node}
        about = {"recipe": Path(settings.options.recipe).name, "run_id": settings.run_id} | _VERSION
        report = parts.console.print_line
        self._series = RunSeries(parts, labels=self._labels, about=about, report=report)
        self._parts = parts
        self._series.start()

    def catch_up(self, settings: Settings) -> str:
        return ""

    def stop(self) -> None:
        if self._series is not None:
            self._series.stop()
        self._server.stop()

    def collect(self) -> Iterable[Metric]:
        if self._parts is None or self._series is None:
            return
        yield from _agent_families(self._parts, self._labels)
        yield from self._series.families

    def _metrics(self, accept: str) -> Answer:
        encode, content_type = _encoder_for(accept)
        if not self._rendering.acquire(timeout=_RENDERING_S):
            return Answer(status=_UNAVAILABLE, body=b"an earlier scrape has not ended\n")
        try:
            at_s, body = self._rendered.get(content_type, (0.0, b""))
            now_s = self._clock.monotonic()
            if not body or now_s - at_s >= _RENDERED_FOR_S:
                body = encode(self._registry)
                self._rendered = {content_type: (now_s, body)}
        finally:
            self._rendering.release()
        return Answer(body=body, content_type=content_type)

    def _healthz(self, _accept: str) -> Answer:
        health = None if self._parts is None else self._parts.health
        if health is None:
            return Answer(body=b"ok: the agent starts\n")
        if health.turns:
            return Answer(body=b"ok: the agent's loop turns\n")
        text = f"the agent's loop has stood still for {health.still_s:.0f} s\n"
        return Answer(status=_UNAVAILABLE, body=text.encode())

    def _readyz(self, _accept: str) -> Answer:
        generation = None if self._parts is None else self._parts.health.generation
        if generation is None:
            return Answer(status=_UNAVAILABLE, body=b"this node is in no generation\n")
        return Answer(body=f"ok: generation {generation}\n".encode())


def _encoder_for(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """accept: the header of a request."""
    with suppress(TypeError):  # a version that is no number, which the library compares with one
        return choose_encoder(accept)
    return choose_encoder("")


def _agent_families(parts: AgentParts, labels: dict[str, str]) -> Iterable[Metric]:
    """Of this node alone."""
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


_VERSION = {"version": version("elastic-train")}
