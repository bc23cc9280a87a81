"""A run lies in a folder that all nodes share, or in an object store and nothing else is shared; whoever plays a scenario sees either alike.

While nodes run, events are read where they were written, on the nodes' own disks. What is judged afterwards is read as any user would read it, from the store itself,
past the proxy that the nodes' requests go through.
"""

import http.client
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import fsspec
import run_records
from cluster import SCRATCH, SHARED, Cluster
from image import ROOT, interpreter
from oracle import Record
from scenario import Storage
from storage_server import ACCESS, BUCKET, ORDERS_PORT, PROXY_PORT, SERVER_PORT

from elastic.checkpoint.catalog import committed
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.observe import metrics
from elastic.report.download import readable
from elastic.storage.remote import open_store
from elastic.system.clock import SystemClock

STORE = "s1"
SERVER = Path(__file__).parent / "storage_server.py"
SUPPORT = ROOT / "tests" / "support"
START_S = 120.0
CALL_S = 10.0
LOOK_S = 0.05


class Where(Protocol):
    """`url`: for --run-dir; `options`: further ones that a node needs for it; `env`: what it is found by, once `begin` is through."""

    @property
    def url(self) -> str: ...

    @property
    def options(self) -> Sequence[str]: ...

    @property
    def env(self) -> dict[str, str]: ...

    def begin(self) -> None: ...

    def events(self) -> list[Record]:
        """Of all nodes, by time."""

    def step(self) -> int:
        """The newest one that a node has written down."""

    def readable(self) -> AbstractContextManager[RunDir]:
        """A context with the run as a folder."""


class InFolder:
    url = f"{SHARED}/run"
    # A node that is silent for 2 s is out.
    options = ("--keep-alive", "2")
    env: dict[str, str] = {}  # noqa: RUF012 - nobody adds to it

    def __init__(self, cluster: Cluster) -> None:
        self._run = RunDir.parse(str(cluster.shared / "run"))

    def begin(self) -> None:
        pass

    def events(self) -> list[Record]:
        return run_records.events(self._run.events)

    def step(self) -> int:
        return _step([self._run.metrics])

    @contextmanager
    def readable(self) -> Iterator[RunDir]:
        yield self._run


class InStore:
    """The keep-alive is what the command takes by itself there."""

    url = f"s3://{BUCKET}/run"
    options = ()

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def env(self) -> dict[str, str]:
        return ACCESS | {"AWS_ENDPOINT_URL": f"http://{self._address}:{PROXY_PORT}"}

    def begin(self) -> None:
        """Raises TimeoutError where the server does not begin."""
        path = f"PYTHONPATH={SUPPORT}:{ROOT}"
        words = ("env", path, str(interpreter()), str(SERVER), self._address, f"{SCRATCH}/printed")
        self._cluster.serve({STORE: words})
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.order(Storage.HEAL)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"expected an object store within {START_S:.0f} s, found: {error}"
                    ) from error
                time.sleep(LOOK_S)
            else:
                return

    def order(self, storage: Storage) -> None:
        """It is so for each request that begins after this."""
        if storage is Storage.STALE:
            # The proxy shows what it listed last, so somebody lists what a reader would.
            with reached(self.env["AWS_ENDPOINT_URL"]):
                committed(open_store(f"{self.url}/checkpoints"), SystemClock())
        self._ask("PUT", storage.name)

    def has_struck(self) -> bool:
        """Whether a request met the newest order."""
        return int(self._ask("GET", "")) > 0

    def events(self) -> list[Record]:
        found = [event for run in self._runs() for event in run_records.events(run / "events")]
        return sorted(found, key=lambda event: event["time"])

    def step(self) -> int:
        return _step([path for run in self._runs() for path in run.glob("metrics/*.jsonl")])

    def carried_events(self) -> list[Record]:
        try:
            with self.readable() as run:
                return run_records.events(run.events)
        except UsageError:
            return []

    @contextmanager
    def readable(self) -> Iterator[RunDir]:
        with reached(f"http://{self._address}:{SERVER_PORT}"), readable(RunDir.parse(self.url)) as run:
            yield run

    @property
    def _address(self) -> str:
        return self._cluster.address(STORE)

    def _runs(self) -> list[Path]:
        return [path for node in self._cluster.nodes for path in self._cluster.scratch(node).glob("runs/*")]

    def _ask(self, method: str, path: str) -> str:
        server = http.client.HTTPConnection(self._address, ORDERS_PORT, timeout=CALL_S)
        try:
            server.request(method, f"/{path}")
            return server.getresponse().read().decode()
        except http.client.HTTPException as error:
            raise OSError(f"no answer to an order: {error!r}") from error
        finally:
            server.close()


@contextmanager
def reached(endpoint: str) -> Iterator[None]:
    """This process finds an object store by its environment, as the command does; those that it found before are forgotten."""
    before = dict(os.environ)
    os.environ.update(ACCESS | {"AWS_ENDPOINT_URL": endpoint, "NO_PROXY": "*"})
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _step(paths: Sequence[Path]) -> int:
    newest = [line for path in paths if (line := metrics.newest(path)) is not None]
    return max((line.step for line in newest), default=0)
