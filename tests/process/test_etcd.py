"""A real etcd cluster with real faults: members that die or freeze, lost answers, wrong
credentials.
"""

import threading
import time

import pytest
import trustme
from etcd_servers import EtcdServers, free_port
from faulty_storage import Deed, FaultyStorage

from elastic.errors import RendezvousTimeout, UsageError
from elastic.rendezvous.backends import etcd_http, select
from elastic.rendezvous.backends.backend import BackendFailed, BackendRefused
from elastic.rendezvous.backends.etcd import LEASE_S, NEW_LEASE_EVERY_S, EtcdBackend
from elastic.rendezvous.backends.etcd_http import Access, EtcdHttp
from elastic.system.clock import SystemClock
from elastic.testing.fakes import FakeClock

pytestmark = pytest.mark.process

QUICKLY_S = 8.0  # a call of 3 s, on a machine that has other things to do


@pytest.fixture
def cluster(tmp_path):
    servers = EtcdServers(tmp_path, members=3)
    yield servers
    servers.close()


def everything(backend, version, value):
    """One call of each kind, none of which may fail; returns the new version."""
    while not backend.compare_and_set(version, value):
        # The outcome of a write without answer is unknown. This is the only writer, so the value is
        # the old one or ours.
        found = backend.read()
        if found is not None and found[1] == value:
            break
        assert (None if found is None else found[0]) == version
    found = backend.read()
    assert found is not None and found[1] == value
    backend.beat("n")
    assert backend.beats()["n"] > 0
    return found[0]


@pytest.mark.parametrize("harm", ["kill", "freeze"])
def test_no_call_fails_when_a_follower_dies_or_freezes(cluster, harm):
    """SIGKILL or SIGSTOP to the member that answers the calls, which is not the leader."""
    follower = next(member for member in range(3) if member != cluster.leader())
    others = [cluster.url(member) for member in range(3) if member != follower]
    backend = EtcdBackend(",".join([cluster.url(follower), *others]), "g", Access())
    version = everything(backend, None, b"1")
    getattr(cluster, harm)(follower)
    for number in range(2, 6):
        version = everything(backend, version, b"%d" % number)


def test_no_call_fails_when_the_leader_dies(cluster):
    """SIGKILL to the leader; the other members elect another while the calls wait."""
    backend = EtcdBackend(cluster.endpoints, "g", Access())
    version = everything(backend, None, b"1")
    cluster.kill(cluster.leader())
    for number in range(2, 6):
        found = backend.read()
        assert found is not None and found[0] == version
        version = everything(backend, version, b"%d" % number)


def test_without_any_member_calls_fail_quickly_until_they_are_back(cluster):
    """SIGKILL to all three, then the same three with their data."""
    backend = EtcdBackend(cluster.endpoints, "g", Access())
    version = everything(backend, None, b"1")
    for member in range(3):
        cluster.kill(member)
    for call in (
        backend.read,
        backend.beats,
        lambda: backend.beat("n"),
        lambda: backend.compare_and_set(version, b"2"),
    ):
        began = time.monotonic()
        with pytest.raises(BackendFailed, match="cannot be reached"):
            call()
        assert time.monotonic() - began < QUICKLY_S
    for member in range(3):
        cluster.start(member)
    cluster.wait_ready()
    assert backend.read() == (version, b"1")
    everything(backend, version, b"2")


def test_a_minority_refuses_and_does_not_hang(cluster):
    """Two of three are killed: the third is there, but may not speak for the cluster."""
    backend = EtcdBackend(cluster.endpoints, "g", Access())
    everything(backend, None, b"1")
    cluster.kill(0)
    cluster.kill(1)
    began = time.monotonic()
    with pytest.raises(BackendFailed):
        backend.read()
    assert time.monotonic() - began < QUICKLY_S


def test_the_outcome_of_a_write_without_answer_is_found_by_reading(etcd):
    """The proxy sees the write done and breaks the connection, both times that it is sent."""
    proxy = FaultyStorage(etcd.port())
    backend = EtcdBackend(proxy.endpoint, "lost-answer", Access())
    try:
        lost = proxy.fail(Deed.LOSE, lambda method, path: path.endswith("/kv/txn"))
        assert not backend.compare_and_set(None, b"mine")
        assert lost.struck == 2
        proxy.heal()
        found = backend.read()
        assert found is not None and found[1] == b"mine"
        assert backend.compare_and_set(found[0], b"next")
    finally:
        proxy.close()


def test_a_heartbeat_without_answer_fails_and_the_next_one_counts(etcd):
    """The proxy breaks the connection as above."""
    proxy = FaultyStorage(etcd.port())
    backend = EtcdBackend(proxy.endpoint, "lost-beat", Access())
    try:
        backend.beat("n")
        before = backend.beats()["n"]
        proxy.fail(Deed.LOSE, lambda method, path: path.endswith("/kv/put"))
        with pytest.raises(BackendFailed, match="did not answer"):
            backend.beat("n")
        proxy.heal()
        backend.beat("n")
        assert backend.beats()["n"] > before
    finally:
        proxy.close()


def test_a_lease_is_replaced_before_it_expires_and_after(etcd):
    """The clock moves past the time for a new lease. Then the lease is revoked, as if it had
    expired while the machine slept.
    """
    clock = FakeClock()
    backend = EtcdBackend(etcd.endpoints, "leases", Access(), clock)
    backend.beat("n")
    first = backend._lease
    clock.now += NEW_LEASE_EVERY_S + 1
    backend.beat("n")
    etcd.post(0, "lease/revoke", {"ID": first})
    assert EtcdBackend(etcd.endpoints, "leases", Access()).beats().keys() == {"n"}
    second = backend._lease
    left = etcd.post(0, "lease/timetolive", {"ID": second})
    assert int(left["grantedTTL"]) == LEASE_S
    etcd.post(0, "lease/revoke", {"ID": second})
    assert EtcdBackend(etcd.endpoints, "leases", Access()).beats() == {}
    backend.beat("n")
    assert backend._lease != second
    assert backend.beats().keys() == {"n"}


def test_a_deleted_state_is_not_taken_for_an_empty_group(etcd):
    """A person removes the key under a live group."""
    backend = EtcdBackend(etcd.endpoints, "deleted", Access())
    assert backend.compare_and_set(None, b"x")
    assert backend.read() is not None
    etcd.post(0, "kv/deleterange", {"key": "ZWxhc3RpYy8=", "range_end": "ZWxhc3RpYzA="})
    with pytest.raises(BackendFailed, match="stop all agents"):
        backend.read()


def test_a_missing_or_wrong_password_is_refused(tmp_path):
    """No password, a wrong one, the right one; then the server restarts and has forgotten the
    token.
    """
    servers = EtcdServers(tmp_path)
    try:
        before = EtcdBackend(servers.endpoints, "g", Access(user="trainer:right"))
        before.beat("n")  # a password that the server does not ask for does no harm
        servers.ask_for_a_password("trainer", "right")
        for access, says in (
            (Access(), "check ETCDCTL_USER"),
            (Access(user="trainer:wrong"), "with the password in ETCDCTL_USER"),
        ):
            stranger = EtcdBackend(servers.endpoints, "g", access)
            with pytest.raises(BackendRefused, match=says):
                stranger.read()
            with pytest.raises(UsageError, match=says):
                select.wait_for(stranger.read, patience_s=60, clock=SystemClock(), notify=print)
        known = EtcdBackend(servers.endpoints, "g", Access(user="trainer:right"))
        version = everything(known, None, b"1")
        before.beat("n")
        servers.kill(0)
        servers.start(0)
        servers.wait_ready()
        everything(known, version, b"2")
        with pytest.raises(BackendRefused, match="permission denied"):
            EtcdHttp(servers.endpoints, Access(user="trainer:right")).call("kv/range", {"key": "AAAA"})
    finally:
        servers.close()


def test_tls_authenticates_both_sides(tmp_path):
    """With the right CA and a client certificate all calls work; without either, or for a server of
    another CA, none does.
    """
    ours, others = trustme.CA(), trustme.CA()
    paths = {}
    for name, ca in (("ours", ours), ("others", others)):
        paths[name] = tmp_path / f"{name}.pem"
        ca.cert_pem.write_to_path(paths[name])
        for who, issued in (("server", ca.issue_cert("127.0.0.1")), ("client", ca.issue_cert("trainer"))):
            issued.private_key_pem.write_to_path(tmp_path / f"{name}-{who}.key")
            issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}-{who}.pem")
    tls = (paths["ours"], tmp_path / "ours-server.pem", tmp_path / "ours-server.key")
    servers = EtcdServers(tmp_path, tls=tls)

    def access(ca, client):
        return Access(
            ca=str(paths[ca]),
            certificate=str(tmp_path / f"{client}-client.pem"),
            key=str(tmp_path / f"{client}-client.key"),
        )

    try:
        everything(EtcdBackend(servers.endpoints, "g", access("ours", "ours")), None, b"1")
        for stranger in (access("others", "ours"), Access(ca=str(paths["ours"])), access("ours", "others")):
            with pytest.raises(BackendFailed):
                EtcdBackend(servers.endpoints, "g", stranger).read()
        with pytest.raises(BackendRefused, match="ETCDCTL_CACERT"):
            EtcdBackend(servers.endpoints, "g", access("others", "ours")).read()
    finally:
        servers.close()


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, Access()),
        ({"ETCDCTL_USER": "a:b:c"}, Access(user="a:b:c")),
        ({"ETCDCTL_USER": "a", "ETCDCTL_PASSWORD": "b"}, Access(user="a:b")),
        (
            {"ETCDCTL_CACERT": "/ca", "ETCDCTL_CERT": "/c", "ETCDCTL_KEY": "/k", "ETCDCTL_USER": ""},
            Access(ca="/ca", certificate="/c", key="/k"),
        ),
    ],
)
def test_credentials_come_from_the_variables_of_etcdctl(environ, found):
    assert Access.from_environment(environ) == found


def test_wrong_credentials_and_addresses_are_usage_errors(tmp_path):
    """A name without a password, a certificate that does not exist, malformed addresses."""
    with pytest.raises(UsageError, match="only the name 'a'"):
        Access.from_environment({"ETCDCTL_USER": "a"})
    with pytest.raises(UsageError, match="ETCDCTL_CACERT"):
        EtcdHttp("a", Access(ca=str(tmp_path / "none.pem")))
    for endpoints in ("ftp://a", "", "a,,b", "https://", "a:99999"):
        with pytest.raises(UsageError, match="endpoint"):
            EtcdHttp(endpoints, Access())


def test_servers_and_nodes_may_start_in_any_order(tmp_path):
    """The node waits until etcd is started, and reports that once. It gives up if etcd never
    starts.
    """
    missing = EtcdBackend(f"127.0.0.1:{free_port()}", "g", Access())
    said, clock = [], FakeClock()
    began = clock.now
    with pytest.raises(RendezvousTimeout, match="gave up after 5 s"):
        select.wait_for(missing.read, patience_s=5, clock=clock, notify=said.append)
    assert len(said) == 1 and clock.now <= began + 5

    servers = EtcdServers(tmp_path)
    try:
        backend = EtcdBackend(servers.endpoints, "g", Access())
        servers.kill(0)
        waiting = threading.Event()
        waiter = threading.Thread(
            target=lambda: select.wait_for(
                backend.read, patience_s=60, clock=SystemClock(), notify=lambda _: waiting.set()
            )
        )
        waiter.start()
        assert waiting.wait(timeout=60)
        servers.start(0)
        waiter.join(timeout=60)
        assert not waiter.is_alive()
    finally:
        servers.close()


def test_an_answer_of_another_program_is_a_failure(monkeypatch):
    """Another server listens on the port."""
    for status, data in (
        (200, b"<html>"),
        (200, b"[]"),
        (404, b"not found"),
        (500, b'{"message": "x"}'),
        (302, b"{}"),
    ):
        monkeypatch.setattr(
            etcd_http.urllib3.PoolManager,
            "request",
            lambda *_, status=status, data=data, **__: type("R", (), {"status": status, "data": data})(),
        )
        backend = EtcdBackend("a", "g", Access())
        with pytest.raises(BackendFailed):
            backend.read()


def test_logging_in_twice_stays_within_the_limit_of_one_call(monkeypatch):
    """Each of log-in, call, second log-in and second call is answered just before its own limit;
    the member has forgotten the token.
    """
    clock = FakeClock()
    began = clock.now

    def request(_pool, _method, url, *, timeout, **_):
        clock.now += min(timeout.total, etcd_http.ANSWER_S)
        stale = (401, b'{"code": 16, "message": "invalid auth token"}')
        status, data = (200, b'{"token": "t"}') if "authenticate" in url else stale
        return type("R", (), {"status": status, "data": data})()

    monkeypatch.setattr(etcd_http.urllib3.PoolManager, "request", request)
    with pytest.raises(BackendRefused):
        EtcdHttp("a", Access(user="a:b"), clock).call("kv/range", {})
    assert clock.now - began < etcd_http.CALL_S + 1.0
