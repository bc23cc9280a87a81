"""The store in the memory of one agent: it is lost, an empty one follows, and no version steps
back.
"""

import contextlib
import socket
import threading

import pytest
from etcd_servers import free_port

from elastic.rendezvous.backends import tcp_store, tcp_store_client
from elastic.rendezvous.backends.backend import BackendFailed, MayHost
from elastic.rendezvous.backends.tcp_store import StoredVersion, TcpStoreBackend
from elastic.rendezvous.backends.tcp_store_client import TcpStoreClient
from elastic.system.clock import SystemClock


@pytest.fixture
def nodes(monkeypatch):
    """Opens nodes on one port. Those that shall not host the store could not, as on another
    machine.
    """
    monkeypatch.setattr(tcp_store_client, "RETRY_S", 0.0)
    # A busy machine may take longer than the limits for what is not meant to reach them.
    monkeypatch.setattr(tcp_store_client, "CONNECT_S", 60.0)
    monkeypatch.setattr(tcp_store_client, "ANSWER_S", 60.0)
    monkeypatch.setattr(tcp_store_client, "OPEN_S", 120.0)
    port, opened = free_port(), []

    def node(*, host=False):
        monkeypatch.setattr(tcp_store, "is_own_address", lambda _: host)
        opened.append(TcpStoreBackend(f"127.0.0.1:{port}", "g"))
        if host:
            opened[-1].read()
        return opened[-1]

    yield node
    for each in opened:
        each.close()


def polled(act):
    """Poll as agents do: the first call finds the old connection broken, and a late one is
    repeated.
    """
    for _ in range(50):
        with contextlib.suppress(BackendFailed):
            return act()
    return act()


def test_a_name_that_comes_to_mean_this_machine_is_served_from_then_on(nodes, monkeypatch):
    """A pod's agent starts before the pod's name has its new address."""
    answers = iter([False, True])
    monkeypatch.setattr(tcp_store, "is_own_address", lambda _: next(answers))
    early = TcpStoreBackend(f"127.0.0.1:{free_port()}", "g")
    with contextlib.closing(early):
        with pytest.raises(BackendFailed):
            early.read()
        assert not early.is_host
        assert polled(early.read) is None
        assert early.is_host


def test_exactly_one_node_with_the_address_hosts_the_store(nodes):
    """Two agents on the machine of the endpoint, and a third one elsewhere."""
    first, second, third = nodes(host=True), nodes(host=True), nodes()
    assert third.compare_and_set(None, b"x")
    assert isinstance(first, MayHost)
    assert [each.is_host for each in (first, second, third)] == [True, False, False]
    assert second.read() == third.read()


def test_a_survivor_puts_the_newest_state_back_into_an_empty_store(nodes):
    """The host dies with the store. Another serves an empty one at the same address and writes
    before the survivor polls.
    """
    host, survivor = nodes(host=True), nodes()
    survivor.publish_generation(7)
    survivor.beat("s")
    survivor.beat("s")
    assert survivor.compare_and_set(None, b"one")
    version, _ = survivor.read()
    assert survivor.compare_and_set(version, b"two")
    newest = survivor.read()
    host.close()
    for call in (
        survivor.read,
        survivor.beats,
        lambda: survivor.beat("s"),
        lambda: survivor.compare_and_set(newest[0], b""),
    ):
        with pytest.raises(BackendFailed, match="does the agent on that host run"):
            call()

    restarted = nodes(host=True)
    restarted.publish_generation(1)
    assert restarted.compare_and_set(None, b"a beginning of its own")
    assert survivor.read() == newest
    assert restarted.read() == newest
    survivor.publish_generation(7)
    assert restarted.shown_generation() == 7
    before = survivor.beats().get("s")
    survivor.beat("s")
    assert before is None and restarted.beats() == {"s": 3}
    assert restarted.compare_and_set(newest[0], b"three")
    found = survivor.read()
    assert found[0] > newest[0] and found[1] == b"three"


def test_survivors_that_restore_a_store_at_once_agree_on_the_newest_state(nodes):
    """One has seen one version more than the other. Both, and a new node that writes, find an empty
    store, again and again.
    """
    for _ in range(10):
        host, older, newer = nodes(host=True), nodes(), nodes()
        assert newer.compare_and_set(None, b"1")
        seen = older.read()
        assert newer.compare_and_set(seen[0], b"2")
        newest = newer.read()
        host.close()
        restarted = nodes(host=True)
        barrier = threading.Barrier(3)

        def at_once(act, barrier=barrier):
            barrier.wait(timeout=60)
            polled(act)

        acts = [older.read, newer.read, lambda node=restarted: node.compare_and_set(None, b"fresh")]
        threads = [threading.Thread(target=at_once, args=(act,)) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert [polled(each.read) for each in (newer, older, restarted)] == [newest] * 3
        for each in (older, newer, restarted):
            each.close()


def test_a_later_generation_wins_over_many_versions_of_an_earlier_one(nodes):
    """An empty store reaches generation 3 in few writes, before a survivor that wrote often in
    generation 2 polls again.
    """
    host, survivor = nodes(host=True), nodes()
    survivor.publish_generation(2)
    version = None
    for _ in range(20):
        assert survivor.compare_and_set(version, b"old")
        version, _ = survivor.read()
    host.close()
    restarted = nodes(host=True)
    restarted.publish_generation(3)
    assert restarted.compare_and_set(None, b"new")
    with pytest.raises(BackendFailed):
        survivor.read()
    assert survivor.read() == restarted.read()
    assert survivor.read()[1] == b"new"


def test_the_value_that_forms_a_generation_wins_over_all_of_the_one_before(nodes):
    """The store's new host forms generation 3 and has not polled since; a survivor of generation 2
    comes back.
    """
    host, survivor = nodes(host=True), nodes()
    survivor.publish_generation(2)
    assert survivor.compare_and_set(None, b"old")
    host.close()
    restarted = nodes(host=True)
    restarted.publish_generation(2)
    restarted.write_as_of(3)
    assert restarted.compare_and_set(None, b"new")
    with pytest.raises(BackendFailed):
        survivor.read()
    assert survivor.read() == restarted.read()
    assert survivor.read()[1] == b"new"


def test_of_two_writers_of_equal_values_only_one_wins(nodes):
    """Both evict the same node, so both write the same bytes for the same version."""
    first, second = nodes(host=True), nodes()
    assert first.compare_and_set(None, b"same")
    assert not second.compare_and_set(None, b"same")


@pytest.mark.parametrize("text", ["", "1", "x y z", "1 w", "1 ab YQ==", "1 "])
def test_a_value_of_another_program_is_a_failure_with_advice(text):
    """Values that are no group."""
    with pytest.raises(BackendFailed, match="another program"):
        StoredVersion.parse(text)


def test_requests_of_earlier_generations_are_deleted_also_where_no_one_reads_them(nodes):
    """A group of many nodes becomes small, and each writes for itself from then on. One node is
    slow: it leaves its request behind when another has deleted those of that generation.
    """
    ours, theirs = nodes(host=True), nodes()
    for generation in range(3):
        ours.publish_generation(generation)
        ours.request("a", "join")
        if generation:
            theirs.request("b", "join")  # of the generation before
        theirs.publish_generation(generation)
    ours.publish_generation(3)
    theirs.publish_generation(3)
    with ours._client.use("look at the keys") as store:
        assert not any(store.check([ours._key(f"requests/{number}")]) for number in range(4))


def test_a_call_that_hangs_is_cut_off_also_where_the_host_has_no_name_any_more(monkeypatch):
    """The host listens and never answers; its name cannot be looked up once the call has begun."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with tcp_store_client._abort_after(0.01, "localhost", port):

            def lost(*_arguments, **_options):
                raise socket.gaierror(socket.EAI_AGAIN, "no answer of the name server")

            monkeypatch.setattr(socket, "getaddrinfo", lost)
            with socket.socket() as calling:
                calling.settimeout(60.0)
                calling.connect(("127.0.0.1", port))
                assert calling.recv(1) == b""


class NameServer:
    """It answers nothing until it is told to. asked: how many lookups have begun."""

    def __init__(self, monkeypatch):
        self.asked = 0
        self.answers = threading.Event()
        self.began = threading.Event()
        self._look_up = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self.look_up)

    def look_up(self, *arguments, **options):
        self.asked += 1
        self.began.set()
        assert self.answers.wait(timeout=60)
        return self._look_up(*arguments, **options)


@pytest.fixture
def name_server(nodes, monkeypatch):
    nodes(host=True).publish_generation(5)
    server = NameServer(monkeypatch)
    monkeypatch.setattr(tcp_store_client, "OPEN_S", 0.0)
    yield server
    server.answers.set()


def test_a_name_server_that_does_not_answer_holds_up_no_call_for_long(nodes, name_server):
    """The host is there, and its name is asked for. All calls fail meanwhile, without a second
    lookup, and the connection that is there in the end is used.
    """
    node = nodes()
    for _ in range(3):
        with pytest.raises(BackendFailed, match="no name server answers"):
            node.read()
    assert name_server.began.wait(timeout=60)
    assert name_server.asked == 1

    opening = node._client._opening
    name_server.answers.set()
    opening.result(timeout=60)
    assert node.shown_generation() == 5
    assert node._client.connections == 1


def test_a_lookup_that_fails_late_fails_a_call_with_its_reason_and_is_repeated(
    nodes, name_server, monkeypatch
):
    """The resolver gives up after its own limit. Then the name server is back."""
    node, look_up = nodes(), name_server._look_up

    def lost(*_arguments, **_options):
        raise socket.gaierror(socket.EAI_AGAIN, "no answer of the name server")

    name_server._look_up = lost
    with pytest.raises(BackendFailed):
        node.read()
    opening = node._client._opening
    name_server.answers.set()
    assert isinstance(opening.exception(timeout=60), socket.gaierror)
    with pytest.raises(BackendFailed, match="no answer of the name server"):
        node.read()

    name_server._look_up = look_up
    monkeypatch.setattr(tcp_store_client, "OPEN_S", 120.0)
    assert node.shown_generation() == 5


def test_a_store_that_is_served_only_after_its_client_was_closed_ends(monkeypatch):
    """The agent ends while a name is looked up, and no store may outlive it within its process."""
    served = object()
    name_server = NameServer(monkeypatch)
    monkeypatch.setattr(tcp_store_client, "OPEN_S", 0.0)
    monkeypatch.setattr(
        tcp_store_client, "_serve", lambda host, port: [socket.getaddrinfo(host, port), served][1]
    )
    monkeypatch.setattr(tcp_store_client, "_connect", lambda _host, _port: served)
    client = TcpStoreClient("localhost", 1, may_host=lambda: True, clock=SystemClock())
    with pytest.raises(BackendFailed), client.use("test"):
        pass
    opening = client._opening
    client.close()
    ended = threading.Event()
    opening.add_done_callback(lambda _: ended.set())
    name_server.answers.set()
    assert ended.wait(timeout=60)
    assert not client.is_host
