"""The agent's end of the connection to its fork server; real servers are in tests/process."""

import json
import os
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.agent import worker_process
from elastic.agent.agent import NodeAgent
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.agent.worker_process import ForkServerClient, Spawner
from elastic.rendezvous.group import RunEnd
from elastic.system.fork_protocol import Exited, Ready, Started, StartRequest
from elastic.system.leave_deadline import LeavePage
from elastic.system.untrusted import encode
from elastic.testing.fakes import FakeClock


class ExitedServer:
    """A server process that ends the connection, and then itself, at once."""

    pid = 7
    kills = 0

    def kill(self):
        self.kills += 1

    def wait(self):
        return 3


def test_a_server_that_exited_gets_no_signal_at_the_close():
    """The kernel may have given its pid to another process."""
    server = ExitedServer()
    client = ForkServerClient(lambda *_: server)
    assert client.exit_code_of(8) == -9  # its worker died with it
    client.close()
    assert (server.kills, client.exit_code) == (1, 3)


class ImportingServer:
    """A server process that imports for as long as the test likes."""

    pid = 7

    def __init__(self):
        self.kills = 0

    def start(self, theirs, _output):
        self.connection = Connection(os.dup(theirs.fileno()))
        return self

    def kill(self):
        self.kills += 1

    def wait(self):
        return -9

    def says(self, *messages):
        for each in messages:
            self.connection.send_bytes(json.dumps(encode(each)).encode())


class Questions:
    """Whether the wait is interrupted: the third time that it is asked, and from then on."""

    def __init__(self):
        self.asked = 0

    def __call__(self):
        self.asked += 1
        return self.asked >= 3


@pytest.fixture
def importing(monkeypatch):
    monkeypatch.setattr(worker_process, "ASK_EVERY_S", 0.0)
    server = ImportingServer()
    yield server
    server.connection.close()


@pytest.mark.parametrize("ends", [False, True])
def test_a_worker_with_a_reused_number_has_not_ended(importing, ends):
    """With 32,768 numbers, a node comes back to one within hours. The second worker may end before
    anyone has read that it began.
    """
    client, request = ForkServerClient(importing.start), StartRequest(command=(), env={})
    importing.says(Ready(gpus=0), Started(pid=8, spawned=None), Exited(pid=8, code=0))
    first = client.start(request, (1, 2))
    assert first.poll() == 0
    importing.says(Started(pid=8, spawned=None), *([Exited(pid=8, code=3)] if ends else []))
    assert client.start(request, (1, 2)).poll() == (3 if ends else None)
    client.close()


def test_a_leaving_node_waits_for_no_new_fork_server(importing, monkeypatch):
    """The server has died between two generations, and another one imports for minutes. The newest
    state may be in the agent's memory alone: it is saved by the code that comes after the wait.
    """
    said, questions = [], Questions()
    monkeypatch.setattr(ForkServerClient, "spawn", lambda _: ForkServerClient(lambda *_: ExitedServer()))
    spawner = Spawner(Path("recipe.py"), said.append)
    spawner._server.exit_code_of(8)
    monkeypatch.setattr(ForkServerClient, "spawn", lambda _: ForkServerClient(importing.start))
    spawner.renew(questions)
    assert (questions.asked, said) == (3, ["the fork server died; another one is started"])
    assert (spawner._server.pid, spawner._server.is_ready, importing.kills) == (importing.pid, False, 0)
    importing.says(Ready(gpus=0))
    spawner._server.wait_ready()
    assert spawner._server.is_ready
    spawner.close()


def test_a_leaving_agent_waits_for_no_imports():
    """The newest state may be in its memory alone: it is saved by the code after that wait."""
    shutdown, revived, waited = ShutdownRequest(LeavePage(30.0), FakeClock()), [], []

    def renew(interrupted):
        waited.append(interrupted())
        shutdown.request("SIGTERM")
        waited.append(interrupted())

    agent = NodeAgent.__new__(NodeAgent)
    agent._parts = SimpleNamespace(
        shutdown=shutdown, spawner=SimpleNamespace(renew=renew), revive_uploader=lambda: revived.append(1)
    )
    agent._generation = None
    agent._join_and_train = lambda: RunEnd(exit_code=75, reason="")
    agent.run()
    assert (waited, len(revived)) == ([False, True], 2)
