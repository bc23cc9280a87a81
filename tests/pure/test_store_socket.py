"""An agent listens for the store of a generation, and hands that socket to one of its workers."""

import socket
from unittest.mock import Mock

import pytest

from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.store_socket import MOST_TRIES, StoreSockets
from elastic.train.groups import open_store


def connects(endpoint):
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_an_earlier_try_that_won_is_served_others_are_closed():
    """A write to form a generation failed, was tried again, and the first one counts."""
    sockets = StoreSockets("127.0.0.1")
    tries = [sockets.open() for _ in range(MOST_TRIES + 2)]
    assert [connects(each) for each in tries] == [False, False, *(MOST_TRIES * [True])]
    with sockets.take(tries[2]) as taken:
        assert taken.getsockname()[1] == int(tries[2].rpartition(":")[2])
        assert [connects(each) for each in tries[2:4]] == [True, False]
    assert sockets.take(tries[3]) is None


def test_a_worker_that_comes_early_waits_for_the_store():
    """It is in the queue of the socket before the store is served."""
    sockets = StoreSockets("127.0.0.1")
    endpoint = sockets.open()
    port = int(endpoint.rpartition(":")[2])
    early = socket.create_connection(("127.0.0.1", port))
    served = open_store("127.0.0.1", port, sockets.take(endpoint).detach())
    early.close()
    other = open_store("127.0.0.1", port, None)
    other.set("who", "me")
    assert served.get("who") == b"me"


def test_a_node_without_a_descriptor_tries_again_later(monkeypatch):
    refuse = Mock(side_effect=OSError(24, "Too many open files"))
    monkeypatch.setattr("elastic.rendezvous.store_socket.listen_on", refuse)
    with pytest.raises(BackendFailed, match="Too many open files; trying again"):
        StoreSockets("127.0.0.1").open()
