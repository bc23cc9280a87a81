"""The agent's end of the connection to its fork server; real servers are in tests/process."""

from elastic.agent.workers.fork_server_client import ForkServerClient


class ExitedServer:
    """A server process that ends the connection, and then itself, at once."""

    pid = 7
    kills = 0

    def kill(self):
        self.kills += 1

    def wait(self):
        return 3


def test_a_server_that_has_exited_gets_no_signal_when_its_client_closes():
    """The kernel may have given its pid to another process."""
    server = ExitedServer()
    client = ForkServerClient(lambda *_: server)
    assert client.exit_code_of(8) == -9  # its worker died with it
    client.close()
    assert (server.kills, client.exit_code) == (1, 3)
