"""The agent's end of the connection to its fork server; real servers are in tests/process."""

import json
import os
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from elastic.agent import worker_process
from elastic.agent.agent import NodeAgent
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.agent.worker_process import Process, Spawner
from elastic.errors import CannotStart
from elastic.rendezvous.group import RunEnd
from elastic.system.leave_deadline import LeavePage
from elastic.system.untrusted import encode
from elastic.system.worker_protocol import Exited, Ready, Started, StartRequest
from elastic.testing.fakes import FakeClock


class Server:
    """A server process that says what the test has it say, and ends when that hangs up."""

    pid = 7

    def __init__(self):
        self.kills, self.connection = 0, None

    def start(self, theirs, _output):
        self.connection = Connection(os.dup(theirs.fileno()))
        return self

    def kill(self):
        self.kills += 1

    def wait(self):
        return 3

    def says(self, *messages):
        for each in messages:
            self.connection.send_bytes(json.dumps(encode(each)).encode())


@pytest.fixture
def servers(monkeypatch):
    """Those that a spawner starts, one after another."""
    monkeypatch.setattr(worker_process, "ASK_EVERY_S", 0.0)
    found = [Server() for _ in range(3)]
    left = iter(found)
    monkeypatch.setattr(worker_process, "spawn_server", lambda *words: next(left).start(*words))
    yield found
    for each in found:
        if each.connection is not None:
            each.connection.close()


def test_a_server_that_exited_gets_no_signal_at_the_close(servers):
    """The kernel may have given its pid to another process."""
    spawner = Spawner(print)
    servers[0].connection.close()
    assert Process(spawner, 8).poll() == -9  # it died with the server
    spawner.close()
    assert (servers[0].kills, spawner.exit_code) == (1, 3)


@pytest.mark.parametrize("ends", [False, True])
def test_a_worker_with_a_reused_number_has_not_ended(servers, ends, monkeypatch):
    """With 32,768 numbers, a node comes back to one within hours. The second worker may end before
    anyone has read that it began. The first one, which is gone, is not killed.
    """
    spawner, request = Spawner(print), StartRequest(command=(), env={})
    servers[0].says(Ready(gpus=0), Started(pid=8, reason=None), Exited(pid=8, code=0))
    first = spawner.start(request, 1, 2)
    assert first.poll() == 0
    monkeypatch.setattr(worker_process.os, "killpg", pytest.fail)
    first.kill()
    servers[0].says(Started(pid=8, reason=None), *([Exited(pid=8, code=3)] if ends else []))
    assert spawner.start(request, 1, 2).poll() == (3 if ends else None)
    spawner.close()


def test_a_leaving_node_waits_for_no_new_fork_server(servers):
    """The server has died between two generations, and another one imports for minutes. The newest
    state may be in the agent's memory alone: it is saved by the code that comes after the wait.
    """
    said, asked = [], []
    spawner = Spawner(said.append)
    servers[0].connection.close()
    spawner.renew(lambda: asked.append(1) or len(asked) == 3)
    assert (len(asked), said) == (3, ["the fork server died; another one is started"])
    assert servers[1].kills == 0
    servers[1].says(Ready(gpus=2))
    assert spawner.count_gpus() == 2
    spawner.close()


def test_a_server_that_ends_while_it_imports_is_not_tried_again(servers):
    """Another one imports nothing, and spawns all workers. If that ends too, no worker starts."""
    said = []
    spawner = Spawner(said.append)
    servers[0].connection.close()
    spawner.wait_ready(lambda: servers[1].says(Ready(gpus=None)))
    assert said[0].endswith("not forked from the fork server: the fork server ended")
    servers[1].connection.close()
    with pytest.raises(CannotStart):
        spawner.start(StartRequest(command=(), env={}))
    spawner.close()


def test_a_leaving_agent_waits_for_no_imports():
    """The newest state may be in its memory alone: it is saved by the code after that wait."""
    shutdown, revived, waited = ShutdownRequest(LeavePage(30.0), FakeClock()), [], []

    def renew(interrupted):
        waited.append(interrupted())
        shutdown.request("SIGTERM")
        waited.append(interrupted())

    agent = NodeAgent.__new__(NodeAgent)
    parts = {"spawner": SimpleNamespace(renew=renew), "revive_uploader": lambda: revived.append(1)}
    agent._parts = SimpleNamespace(**parts, shutdown=shutdown, memory=SimpleNamespace(newest=None))
    agent._generation, agent._standbys = None, SimpleNamespace(close=lambda: None)
    agent._join_and_train = lambda: RunEnd(exit_code=75, reason="")
    agent.run()
    assert (waited, len(revived)) == ([False, True], 2)
