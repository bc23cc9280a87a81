"""No client of `--http` can hold up a page, and a health that stands still is told."""

import socket
from types import SimpleNamespace

import pytest

from elastic.agent.parts import STANDS_STILL_S, AgentHealth
from elastic.config.options import ListenAddress
from elastic.errors import UsageError
from elastic.report.agent_pages import AgentPages
from elastic.report.http_server import MOST_CONNECTIONS, Answer, HttpServer, listen
from elastic.system.clock import SystemClock
from elastic.testing.fakes import FakeClock

BIG = b"x" * 2**24  # more than the buffers of two sockets


@pytest.fixture
def serve():
    made = []

    def start(pages):
        made.append(HttpServer(listen(ListenAddress(host="127.0.0.1", port=0)), pages, SystemClock()))
        made[-1].start()
        return made[-1].address

    yield start
    for each in made:
        each.stop()


def ask(address, text: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    with socket.create_connection((address.host, address.port), timeout=60) as client:
        client.sendall(text)
        return b"".join(iter(lambda: client.recv(2**16), b""))


PAGES = {"/ok": lambda accept: Answer(body=f"accepts {accept}".encode())}


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        (b"GET /ok?x=1 HTTP/1.1\r\nAccept: a/b\r\n\r\n", b"HTTP/1.0 200 "),
        (b"HEAD /ok HTTP/1.1\r\n\r\n", b"HTTP/1.0 200 "),
        (b"GET /other HTTP/1.1\r\n\r\n", b"HTTP/1.0 404 "),
        (b"POST /ok HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.0 501 "),
        (b"nonsense\r\n\r\n", b""),
        (b"\x16\x03\x01\0\xff\xff\r\n\r\n", b""),
        (b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n", b"HTTP/1."),
        (b"GET /ok HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"HTTP/1.0 431 "),
    ],
)
def test_each_request_gets_an_answer_or_an_end(serve, text, begins):
    try:
        assert ask(serve(PAGES), text).startswith(begins)
    except ConnectionError:  # it was closed before all of it was read
        assert len(text) > 60_000


def test_an_answer_fits_what_is_accepted_a_failing_page_says_so(serve):
    address = serve(PAGES | {"/bad": lambda _accept: 1 / 0})
    assert ask(address, b"GET /ok HTTP/1.1\r\nAccept: a/b\r\n\r\n").endswith(b"\r\n\r\naccepts a/b")
    assert ask(address, b"GET /bad HTTP/1.1\r\n\r\n").endswith(b"ZeroDivisionError: division by zero\n")


def test_more_slow_clients_than_connections_keep_no_probe_out(serve):
    """Half of them send nothing, the others read nothing of a long answer."""
    address = serve(PAGES | {"/big": lambda _accept: Answer(body=BIG)})
    slow = []
    for number in range(3 * MOST_CONNECTIONS):
        slow.append(socket.create_connection((address.host, address.port), timeout=60))
        if number % 2:
            slow[-1].sendall(b"GET /big HTTP/1.1\r\n\r\n")
    assert ask(address, b"GET /ok HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 200 ")
    for each in slow:
        each.close()


@pytest.mark.parametrize("text", ["192.0.2.1:80", "no-such-host.invalid:80"])
def test_an_address_of_another_machine_is_refused(text):
    with pytest.raises(UsageError, match=f"expected to listen on {text}, found: "):
        listen(ListenAddress.parse(text))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:9100", "127.0.0.1", 9100), ("[::1]:0", "::1", 0), ("node-1.a_b:65535", "node-1.a_b", 65535)],
)
def test_an_address_is_read_and_written(text, host, port):
    found = ListenAddress.parse(text)
    assert (found.host, found.port, str(found)) == (host, port, text)


@pytest.mark.parametrize(
    "text", ["", "9100", ":9100", "host:", "host:65536", "::1:9100", "[::1]", "a b:1", "h:1x"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UsageError, match="expected HOST:PORT such as"):
        ListenAddress.parse(text)


def test_probes_tell_a_still_loop_from_a_node_not_training():
    clock = FakeClock()
    health = AgentHealth(clock)
    pages = AgentPages(ListenAddress(host="127.0.0.1", port=0), clock)

    def statuses():
        return [int(pages._healthz("").status), int(pages._readyz("").status)]

    try:
        assert statuses() == [200, 503]  # the agent starts
        pages._parts = SimpleNamespace(health=health)
        health.generation = 1
        assert statuses() == [200, 200]
        clock.sleep(STANDS_STILL_S)
        assert statuses() == [503, 200]
        health.turn()
        health.generation = None
        assert statuses() == [200, 503]
        clock.sleep(STANDS_STILL_S)
        health.end()
        health.turn()  # a wait for the last save
        clock.sleep(STANDS_STILL_S)
        assert statuses() == [200, 503]
    finally:
        pages.stop()
