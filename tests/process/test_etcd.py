"""A real etcd cluster with real faults: members that die or freeze, wrong credentials."""

import time
from functools import partial

import pytest
import trustme

from elastic.errors import UsageError
from elastic.rendezvous.backends import select
from elastic.rendezvous.backends.backend import BackendFailed, BackendRefused
from elastic.rendezvous.backends.etcd import LEASE_S, NEW_LEASE_EVERY_S, EtcdBackend, EtcdHttp
from elastic.system.clock import SystemClock
from elastic.testing.fakes import FakeClock

QUICKLY_S = 8.0  # a call of 3 s, on a machine that has other things to do


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
    backend.show("n", "1")
    assert backend.shown() == {"n": "1"}
    return found[0]


def test_no_call_fails_while_a_majority_of_members_lives(own_etcd):
    """SIGKILL to the member that answers the calls, which is the leader: the others elect another
    while the calls wait. It is back, and another that answers gets SIGSTOP. Of two gone the third
    may not speak for the cluster.
    """
    cluster, version = own_etcd(members=3), None
    for harm, is_leader in ((cluster.kill, True), (cluster.freeze, False)):
        harmed = next(member for member in range(3) if (member == cluster.leader()) == is_leader)
        others = [member for member in range(3) if member != harmed]
        backend = EtcdBackend(",".join(map(cluster.url, (harmed, *others))), "g", {})
        version = everything(backend, version, b"whole")
        harm(harmed)
        for number in range(2, 6):
            found = backend.read()
            assert found is not None and found[0] == version
            version = everything(backend, version, b"%d" % number)
        if is_leader:
            cluster.start(harmed)
            cluster.wait_ready()
    cluster.kill(others[0])
    began = time.monotonic()
    with pytest.raises(BackendFailed):
        backend.read()
    assert time.monotonic() - began < QUICKLY_S


def test_a_lease_is_replaced_before_it_expires_and_after(etcd):
    """The clock moves past the time for a new lease. Then the lease is revoked, as if it had
    expired while the machine slept: one heartbeat fails.
    """
    clock = FakeClock()
    backend = EtcdBackend(etcd.endpoints, "leases", {}, clock)
    backend.show("n", "1")
    first = backend._lease
    clock.now += NEW_LEASE_EVERY_S + 1
    backend.show("n", "1")
    etcd.post(0, "lease/revoke", {"ID": first})
    assert EtcdBackend(etcd.endpoints, "leases", {}).shown().keys() == {"n"}
    second = backend._lease
    assert int(etcd.post(0, "lease/timetolive", {"ID": second})["grantedTTL"]) == LEASE_S
    etcd.post(0, "lease/revoke", {"ID": second})
    assert EtcdBackend(etcd.endpoints, "leases", {}).shown() == {}
    with pytest.raises(BackendFailed, match="lease not found"):
        backend.show("n", "1")
    backend.show("n", "1")
    assert backend._lease != second
    assert backend.shown().keys() == {"n"}


def test_a_missing_or_wrong_password_is_refused(own_etcd):
    """No password, a wrong one, the right one; then the server restarts and has forgotten the
    token.
    """
    servers = own_etcd()
    user = {"ETCDCTL_USER": "trainer:right"}
    before, known = (EtcdBackend(servers.endpoints, "g", user) for _ in "ab")
    # As an agent calls it: a busy server is asked again.
    patiently = partial(select.wait_for, patience_s=60, clock=SystemClock(), notify=print)
    patiently(lambda: before.show("n", "1"))  # a password that the server does not ask for does no harm
    servers.ask_for_a_password("trainer", "right")
    for access, says in (
        ({}, "check ETCDCTL_USER"),
        ({"ETCDCTL_USER": "trainer:wrong"}, "with the password in ETCDCTL_USER"),
    ):
        with pytest.raises(UsageError, match=says):
            patiently(EtcdBackend(servers.endpoints, "g", access).read)
    version = patiently(lambda: everything(known, None, b"1"))
    patiently(lambda: before.show("n", "1"))
    servers.kill(0)
    servers.start(0)
    servers.wait_ready()
    patiently(lambda: everything(known, version, b"2"))
    with pytest.raises(UsageError, match="permission denied"):
        patiently(lambda: EtcdHttp(servers.endpoints, user).call("kv/range", {"key": "AAAA"}))


def test_tls_authenticates_both_sides(tmp_path, own_etcd):
    """With the right CA and a client certificate all calls work; without either none does."""
    ours, others = trustme.CA(), trustme.CA()
    paths = {name: tmp_path / f"{name}.pem" for name in ("ours", "others", "server", "client", "stranger")}
    ours.cert_pem.write_to_path(paths["ours"])
    others.cert_pem.write_to_path(paths["others"])
    for name, ca in (("server", ours), ("client", ours), ("stranger", others)):
        ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(paths[name])
    servers = own_etcd(tls=(paths["ours"], paths["server"], paths["server"]))

    def backend(ca, client=None):
        names = {"CACERT": ca} | ({"CERT": client, "KEY": client} if client else {})
        return EtcdBackend(servers.endpoints, "g", {f"ETCDCTL_{k}": str(paths[v]) for k, v in names.items()})

    everything(backend("ours", "client"), None, b"1")
    for stranger in (backend("others", "client"), backend("ours"), backend("ours", "stranger")):
        with pytest.raises(BackendFailed):
            stranger.read()
    with pytest.raises(BackendRefused, match="ETCDCTL_CACERT"):
        backend("others", "client").read()
