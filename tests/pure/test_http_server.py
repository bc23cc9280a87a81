"""No client of `--http` can hold up a page, and a health that stands still is told."""

import socket
from contextlib import suppress
from types import SimpleNamespace

import pytest

from elastic.agent.parts import STANDS_STILL_S, AgentHealth
from elastic.config.options import ListenAddress
from elastic.errors import UsageError
from elastic.report.agent_pages import AgentPages
from elastic.report.http_server import MOST_THREADS, Answer, HttpServer
from elastic.testing.fakes import FakeClock

LOOPBACK = ListenAddress(host="127.0.0.1", port=0)
PAGES = {"/ok": lambda accept: Answer(body=f"accepts {accept}".encode()), "/bad": lambda _accept: 1 / 0}


@pytest.fixture
def address():
    server = HttpServer(LOOPBACK, PAGES)
    yield server.address
    server.stop()


def ask(address, text):
    """All that the server sends until it closes the connection."""
    with socket.create_connection((address.host, address.port), timeout=60) as client:
        client.sendall(text)
        return b"".join(iter(lambda: client.recv(2**16), b""))


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        (b"HEAD /ok HTTP/1.1\r\n\r\n", b"HTTP/1.0 200 "),
        (b"GET /other HTTP/1.1\r\n\r\n", b"HTTP/1.0 404 "),
        (b"POST /ok HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.0 501 "),
        (b"nonsense\r\n\r\n", b""),
        (b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n", b"HTTP/1."),
        (b"GET /ok HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"HTTP/1.0 431 "),
    ],
)
def test_each_request_gets_an_answer_or_an_end(address, text, begins):
    try:
        assert ask(address, text).startswith(begins)
    except ConnectionError:  # it was closed before all of it was read
        assert len(text) > 60_000


def test_an_answer_fits_what_is_accepted_a_failing_page_says_so(address):
    answer = ask(address, b"GET /ok?x=1 HTTP/1.1\r\nAccept: a/b\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 200 ") and answer.endswith(b"\r\n\r\naccepts a/b")
    assert ask(address, b"GET /bad HTTP/1.1\r\n\r\n").endswith(b"ZeroDivisionError: division by zero\n")


def test_silent_clients_cost_no_more_than_their_threads(address):
    where = address.host, address.port
    silent = [socket.create_connection(where, timeout=60) for _ in range(MOST_THREADS)]
    with suppress(ConnectionError):
        assert silent[-1].recv(1) == b""
    for each in silent:
        each.close()


@pytest.mark.parametrize("text", ["192.0.2.1:80", "no-such-host.invalid:80"])
def test_an_address_of_another_machine_is_refused(text):
    with pytest.raises(UsageError, match=f"expected to listen on {text}, found: "):
        HttpServer(ListenAddress.parse(text), PAGES)


def test_an_ipv6_address_is_written_in_brackets():
    found = ListenAddress(host="::1", port=0)
    assert (ListenAddress.parse("[::1]:0"), str(found)) == (found, "[::1]:0")


@pytest.mark.parametrize(
    "text", ["", "9100", ":9100", "host:", "h:65536", "::1:9100", "[::1]", "a b:1", "h:1x"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UsageError, match="expected HOST:PORT such as"):
        ListenAddress.parse(text)


def test_probes_tell_a_still_loop_from_a_node_not_training():
    clock = FakeClock()
    health = AgentHealth(clock)
    pages = AgentPages(LOOPBACK)

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
