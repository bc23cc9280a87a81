"""What tests of all folders share."""

from collections.abc import Iterator

import pytest
from etcd_servers import EtcdServers


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """One real member, which nobody harms; tests meet in it under names of their own."""
    servers = EtcdServers(tmp_path_factory.mktemp("etcd"))
    yield servers
    servers.close()
