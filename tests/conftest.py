"""Fixtures that the tests of all folders share."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import browser
import pytest
from botocore.loaders import create_loader
from etcd_servers import EtcdServers
from faulty_storage import FaultyStorage
from s3_server import S3Server

from elastic.cli import main
from elastic.errors import EXIT_USAGE
from elastic.storage.remote import Objects

SHARED = ("ranks", "s3", "etcd", "chromium")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a server, a browser or ranks run in one process of xdist. Files of each
    folder are spread over the whole run: tests of processes wait while pure ones compute.
    """
    places, seen = {}, Counter[Path]()
    sizes = Counter(item.path.parent for item in items)
    for item in items:
        folder = item.path.parent
        share = 0.8 if folder.name == "process" else 1.0  # short tests come last
        places.setdefault(item.path, share * seen[folder] / sizes[folder])
        seen[folder] += 1
        for name in set(SHARED).intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: places[item.path])


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command in this process, which ends with this code: what it printed, or its refusal."""

    def run(code: int, *words: object) -> str:
        assert main([str(word) for word in words]) == code
        found = capsys.readouterr()
        return found.err if code == EXIT_USAGE else found.out

    return run


@pytest.fixture(scope="session")
def chromium() -> Iterator[browser.Browser]:
    """Installed where there is none; where it cannot be, tests fail with a sentence."""
    with browser.chromium() as started:
        yield started


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """One real server without faults, in which each test uses a name of its own."""
    with closing(EtcdServers(tmp_path_factory.mktemp("etcd"))) as servers:
        yield servers


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """One real server for all tests of a process; each test has a bucket of its own."""
    with closing(S3Server()) as server, pytest.MonkeyPatch.context() as patch:
        # Each client of the storage library has a loader that parses the same descriptions of all
        # services. That is most of its cost, and tests make hundreds of clients.
        patch.setattr("botocore.session.create_loader", cache(create_loader))
        # A request takes as long as the machine is busy.
        patch.setitem(Objects.__init__.__kwdefaults__, "limit_s", None)
        yield server


@pytest.fixture
def storage(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStorage]:
    """In front of the server, for clients that are made from now on; fails as the test wants.

    The environment of the server itself leads around it.
    """
    with closing(FaultyStorage(s3.port)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def s3_bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket; the environment of this process and its children says where its
    server is.
    """
    for name, value in s3.environ.items():
        monkeypatch.setenv(name, value)
    return s3.bucket()
