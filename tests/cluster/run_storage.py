"""A scenario looks the same whether its run lies in a shared folder or in an object store.

While nodes run, events are read from the disks on which they were written: with an object store,
the nodes' own. The evidence is read afterwards as a user would read it: from the store itself,
bypassing the proxy that injects the store's faults.
"""

import http.client
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import fsspec
import run_records
from cluster import SCRATCH, SHARED, Cluster
from machines import ROOT, interpreter
from oracle import Record
from s3_server import ACCESS
from storage_server import BUCKET, ORDERS_PORT, PROXY_PORT, SERVER_PORT

from elastic.checkpoint.catalog import list_commits
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.observe import metrics
from elastic.report.download import readable
from elastic.storage.remote import open_store
from elastic.storage.store import ObjectNotFound
from elastic.system.clock import SystemClock

STORE = "s1"
SERVER = Path(__file__).parent / "storage_server.py"
SUPPORT = ROOT / "tests" / "support"
START_S = 120.0
CALL_S = 10.0
POLL_S = 0.05


class SharedFolder:
    """url: for --run-dir. options: further options of every node. env: how nodes find the storage,
    complete when `begin` has returned. `events` are those of all nodes so far, by time, and `step`
    is the newest in their metrics; `readable` is a context with the run as a folder.
    """

    url = f"{SHARED}/run"
    # A node that is silent for 2 s is evicted.
    options = ("--keep-alive", "2")
    env: dict[str, str] = {}  # noqa: RUF012 - never changed

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


class ObjectStore:
    """Nodes share nothing else. The keep-alive is the command's own default for object stores."""

    url = f"s3://{BUCKET}/run"
    options = ()

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def env(self) -> dict[str, str]:
        return ACCESS | {"AWS_ENDPOINT_URL": f"http://{self._address}:{PROXY_PORT}"}

    def begin(self) -> None:
        """Start the server. Raises TimeoutError if it does not answer within START_S."""
        path = f"PYTHONPATH={SUPPORT}:{ROOT}"
        words = ("env", path, str(interpreter()), str(SERVER), self._address, f"{SCRATCH}/printed")
        self._cluster.serve({STORE: words})
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.order("heals")
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"expected an object store within {START_S:.0f} s, found: {error}"
                    ) from error
                time.sleep(POLL_S)
            else:
                return

    def order(self, how: str) -> None:
        """In the words of scenario.py; applies to each request that starts after this returns."""
        if how == "lists what was":
            # The proxy repeats the last listing that it saw, so one is made now.
            with reached(self.env["AWS_ENDPOINT_URL"]):
                list_commits(open_store(f"{self.url}/checkpoints"), SystemClock())
        self._ask("PUT", quote(how))

    def was_hit(self) -> bool:
        """Whether the newest order has affected a request."""
        return int(self._ask("GET", "")) > 0

    def events(self) -> list[Record]:
        found = [event for run in self._runs() for event in run_records.events(run / "events")]
        return sorted(found, key=lambda event: event["time"])

    def step(self) -> int:
        return _step([path for run in self._runs() for path in run.glob("metrics/*.jsonl")])

    def uploaded_events(self) -> list[Record]:
        try:
            with self.readable() as run:
                return run_records.events(run.events)
        except UsageError:
            return []

    def committed_step(self) -> int:
        """Of the newest checkpoint that the group has noted; 0 for none."""
        with reached(f"http://{self._address}:{SERVER_PORT}"):
            store = open_store(f"{self.url}/rendezvous/state")
            names, found = [each.name for each in store.list()], 0
            for name in names:
                with suppress(ObjectNotFound):  # an old one, which was removed since
                    found = max(found, json.loads(b"".join(store.read(name)))["committed_step"])
        return found

    @contextmanager
    def readable(self) -> Iterator[RunDir]:
        with reached(f"http://{self._address}:{SERVER_PORT}"), readable(RunDir.parse(self.url)) as run:
            yield run

    @property
    def _address(self) -> str:
        return str(self._cluster.address(STORE))

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


RunStorage = SharedFolder | ObjectStore


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


def _step(paths: Sequence[Path]) -> int:
    newest = [line for path in paths if (line := metrics.newest(path)) is not None]
    return max((line.step for line in newest), default=0)
