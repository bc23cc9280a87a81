"""The store in the memory of one agent: it is lost, an empty one follows, and no version steps
back.
"""

import contextlib
import socket
import threading

import pytest
from etcd_servers import end_stores, free_port

from elastic.rendezvous.backends import host as host_module
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.host import HostBackend


@pytest.fixture
def nodes(monkeypatch):
    """Opens nodes on one port. Those that shall not host the store could not, as on another
    machine.
    """
    # A busy machine may take longer than the limits for what is not meant to reach them.
    for limit, seconds in {"RETRY_S": 0.0, "CONNECT_S": 60.0, "ANSWER_S": 60.0}.items():
        monkeypatch.setattr(host_module, limit, seconds)
    port, opened = free_port(), []

    def node(*, host=False):
        monkeypatch.setattr(host_module, "is_own_address", lambda _: host)
        opened.append(HostBackend(f"127.0.0.1:{port}", "g"))
        if host:
            opened[-1].read()
        return opened[-1]

    yield node
    end_stores(*opened)


def polled(act):
    """As agents poll: the first call finds the old connection broken."""
    for _ in range(50):
        with contextlib.suppress(BackendFailed):
            return act()
    return act()


def test_a_name_that_comes_to_mean_this_machine_is_served(nodes, monkeypatch):
    """A pod's agent starts before the pod's name has its new address."""
    early = nodes()
    with pytest.raises(BackendFailed):
        early.read()
    assert not early.is_host
    monkeypatch.setattr(host_module, "is_own_address", lambda _: True)
    assert polled(early.read) is None
    assert early.is_host


def test_a_survivor_restores_the_newest_state_to_an_empty_store(nodes):
    """The host dies with the store. Another serves an empty one at the same address and writes
    before the survivor polls.
    """
    host, survivor = nodes(host=True), nodes()
    survivor.show("s", "1")
    assert survivor.compare_and_set(None, b'{"generation": 7}')
    assert survivor.compare_and_set(survivor.read()[0], b'{"generation": 7, "two": 2}')
    newest = survivor.read()
    end_stores(host, survivor)
    assert not survivor.compare_and_set(newest[0], b"")
    for call in (survivor.read, survivor.shown, lambda: survivor.show("s", "2")):
        with pytest.raises(BackendFailed, match="does the agent on that host run"):
            call()

    restarted = nodes(host=True)
    assert restarted.compare_and_set(None, b'{"generation": 1}')
    assert polled(survivor.read) == restarted.read() == newest
    survivor.show("s", "3")
    assert restarted.shown() == {"s": "3"}
    assert restarted.compare_and_set(newest[0], b"three")
    assert survivor.read()[0] > newest[0] and survivor.read()[1] == b"three"


def test_a_later_generation_wins_over_more_versions(nodes):
    """An empty store reaches generation 3 in one write, before a survivor that wrote often in
    generation 2 polls again.
    """
    host, survivor = nodes(host=True), nodes()
    version = None
    for _ in range(20):
        assert survivor.compare_and_set(version, b'{"generation": 2}')
        version, _ = survivor.read()
    end_stores(host, survivor)
    restarted = nodes(host=True)
    assert restarted.compare_and_set(None, b'{"generation": 3}')
    assert polled(survivor.read) == restarted.read()
    assert survivor.read()[1] == b'{"generation": 3}'


@pytest.mark.parametrize("line", [b"\x80\x04cos\n", b"{}\n", b'{"op": "x", "group": 1}\n', b"\n", b"[" * 90])
def test_a_stranger_at_the_port_ends_its_own_connection_alone(nodes, line):
    """Bytes that are no question."""
    host = nodes(host=True)
    with socket.create_connection(("127.0.0.1", host._port)) as stranger:
        stranger.sendall(line)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(60.0)
        assert stranger.recv(1) == b""
    assert host.read() is None


@pytest.mark.parametrize("answer", [b"HTTP/1.0 400\r\n\r\n", b"{}\n", b"", None])
def test_another_program_at_the_port_is_a_failure(answer, monkeypatch):
    """It answers, and not as a store does; or it never answers, which holds up no call for long."""
    monkeypatch.setattr(host_module, "is_own_address", lambda _: False)
    if answer is None:
        monkeypatch.setattr(host_module, "ANSWER_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                while connection.recv(65536) and answer is None:
                    pass
                connection.sendall(answer or b"")

        thread = threading.Thread(target=serve)
        thread.start()
        node = HostBackend(f"127.0.0.1:{server.getsockname()[1]}", "g")
        says = "timed out" if answer is None else "does the agent on that host run"
        with pytest.raises(BackendFailed, match=says):
            node.read()
        thread.join(timeout=60)
