"""A scenario looks the same whether its run lies in a shared folder or in an object store.

While nodes run, events are read from the disks on which they were written: with an object store,
the nodes' own. The evidence is read afterwards as a user would read it: from the store itself,
bypassing the proxy that injects the store's faults.
"""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import fsspec
import run_records
from cluster import SHARED, Cluster
from faulty_storage import Deed, FaultyStorage
from oracle import Record
from s3_server import ACCESS, S3Server

from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.report.views import readable

FAULTS = {
    "answers 500": Deed.ERROR,
    "answers 503": Deed.SLOW_DOWN,
    "hangs": Deed.HANG,
    "loses answers": Deed.LOSE,
}


class SharedFolder:
    """url: for --run-dir. options: further options of every node. env: how nodes find the
    storage.
    """

    url = f"{SHARED}/run"
    # A node that is silent for 2 s is evicted.
    options: tuple[str, ...] = ("--keep-alive", "2")

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.env: dict[str, str] = {}

    def events(self) -> list[Record]:
        """Of all nodes so far, by time."""
        found = [event for run in self._runs() for event in run_records.events(run / "events")]
        return sorted(found, key=lambda event: float(event["time"]))

    def step(self) -> int:
        """The newest in the metrics of any node."""
        paths = [path for run in self._runs() for path in run.rglob("*.jsonl") if "events" not in path.parts]
        return max((int(line["step"]) for path in paths for line in run_records.lines(path)), default=0)

    @contextmanager
    def readable(self) -> Iterator[RunDir]:
        """The run as a folder."""
        yield RunDir.parse(str(self._cluster.shared / "run"))

    def _runs(self) -> list[Path]:
        return [self._cluster.shared / "run"]


class ObjectStore(SharedFolder):
    """Nodes share nothing else. The keep-alive is the command's own default for object stores.

    The proxy listens on the machines' network only, at the address that this machine has there.
    """

    options = ()

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._server = cluster.enter_context(closing(S3Server()))
        self._proxy = FaultyStorage(self._server.port, (str(cluster.gateway), 0))
        cluster.callback(self._proxy.close)
        self.url = f"{self._server.bucket()}/run"
        self.env = ACCESS | {"AWS_ENDPOINT_URL": self._proxy.endpoint}

    def fail(self, how: str) -> None:
        """In the words of scenario.py; applies to each request that starts after this returns."""
        deed = FAULTS[how]

        def applies(method: str, path: str) -> bool:
            return deed is not Deed.LOSE or (method == "PUT" and path.endswith("/COMMIT.json"))

        self._fault = self._proxy.fail(deed, applies)

    def was_hit(self) -> bool:
        """Whether the newest fault has affected a request."""
        return self._fault.struck > 0

    def heal(self) -> None:
        self._proxy.heal()

    def uploaded_events(self) -> list[Record]:
        try:
            with self.readable() as run:
                return run_records.events(run.events)
        except UsageError:
            return []

    @contextmanager
    def readable(self) -> Iterator[RunDir]:
        with reached(self._server.endpoint), readable(RunDir.parse(self.url)) as run:
            yield run

    def _runs(self) -> list[Path]:
        return [path for node in self._cluster.nodes for path in self._cluster.scratch(node).glob("runs/*")]


@contextmanager
def reached(endpoint: str) -> Iterator[None]:
    """Let this process find an object store by its environment, as the command does.

    fsspec caches connections by URL alone; those to another store are dropped.
    """
    before = dict(os.environ)
    os.environ.update(ACCESS | {"AWS_ENDPOINT_URL": endpoint, "NO_PROXY": "*"})
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
