"""A call to etcd has the right address, credentials and limits, whatever answers there."""

import threading
from types import SimpleNamespace

import pytest
from etcd_servers import free_port

from elastic.errors import RendezvousTimeout, UsageError
from elastic.rendezvous.backends import etcd, select
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.etcd import EtcdBackend, EtcdHttp
from elastic.testing.fakes import FakeClock


def test_wrong_credentials_and_addresses_are_usage_errors(tmp_path):
    """A certificate that does not exist, malformed addresses."""
    with pytest.raises(UsageError, match="ETCDCTL_CACERT"):
        EtcdHttp("a", {"ETCDCTL_CACERT": str(tmp_path / "none.pem")})
    for endpoints in ("ftp://a", "", "a,,b", "https://", "a:99999"):
        with pytest.raises(UsageError, match="endpoint"):
            EtcdHttp(endpoints, {})


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (200, b"<html>"),
        (200, b"[]"),
        (200, b"{}"),
        (404, b"not found"),
        (500, b'{"message": "x"}'),
    ],
)
def test_an_answer_of_another_program_is_a_failure(status, data, monkeypatch):
    answer = SimpleNamespace(status=status, data=data)
    monkeypatch.setattr(etcd.urllib3.PoolManager, "request", lambda *_words, **_options: answer)
    with pytest.raises(BackendFailed):
        EtcdBackend("a", "g", {}).read()


def test_nodes_and_servers_may_start_in_any_order():
    """The node waits, says so once, and gives up in the end."""
    missing, said, clock = EtcdBackend(f"127.0.0.1:{free_port()}", "g", {}), [], FakeClock()
    began = clock.now
    with pytest.raises(RendezvousTimeout, match="gave up after 5 s"):
        select.wait_for(missing.read, patience_s=5, clock=clock, notify=said.append)
    assert len(said) == 1 and clock.now <= began + 5
    is_up = threading.Event()

    def read():
        if not is_up.is_set():
            raise BackendFailed("away")
        return 1

    assert select.wait_for(read, patience_s=60, clock=clock, notify=lambda _: is_up.set()) == 1
