"""A node publishes the address that gloo would choose, and listens on no other."""

import socket

import pytest

from elastic.errors import UsageError
from elastic.system import addresses
from elastic.system.addresses import listen_on, node_address, split_endpoint

ELSEWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737): no machine has it
KINDS = [socket.SOCK_STREAM, socket.SOCK_DGRAM]


def test_the_address_is_that_of_the_interface_that_gloo_uses():
    """The loopback interface, alone and first of a list, and one that no machine has."""
    assert node_address({"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert node_address({"GLOO_SOCKET_IFNAME": "lo,eth0"}) == "127.0.0.1"
    with pytest.raises(UsageError, match=r"this machine has .*lo"):
        node_address({"GLOO_SOCKET_IFNAME": "nope9"})


def test_the_address_of_an_unknown_host_name_is_loopback(monkeypatch):
    """A container whose host name is in no hosts file."""
    monkeypatch.setattr(addresses.socket, "gethostname", lambda: "no-such-host.invalid")
    assert node_address({}) == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "found"), [("a", ("a", 7)), ("a-1.b:80", ("a-1.b", 80)), ("[::1]:5", ("[::1]", 5))]
)
def test_an_endpoint_is_a_host_and_an_optional_port(text, found):
    """Names, and an IPv6 address in brackets."""
    assert split_endpoint(text, 7) == found


@pytest.mark.parametrize(
    "text", ["", ":80", "a:", "a:0", "a:65536", "a:x", "::1", "a b", "a/b", "a:1:2", "ä", "a..b", "a" * 64]
)
def test_a_malformed_endpoint_is_refused(text):
    """Ports out of range, IPv6 without brackets, white space, labels of a wrong length."""
    with pytest.raises(UsageError, match="expected an endpoint"):
        split_endpoint(text, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_an_own_address_is_the_only_one_that_is_listened_on(kind):
    """A second socket can have the same port at another address of this machine alone."""
    with listen_on("127.0.0.1", kind=kind) as found:
        host, port = found.getsockname()
        assert host == "127.0.0.1"
        with listen_on("127.0.0.2", port, kind) as other:
            assert other.getsockname() == ("127.0.0.2", port)
        with pytest.raises(OSError, match="in use"):
            listen_on("127.0.0.1", port, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("address", [ELSEWHERE, ""])
def test_an_address_behind_nat_is_reached_on_every_interface(kind, address):
    """The published address belongs to a router, not to this machine."""
    with listen_on(address, kind=kind) as found, socket.socket(socket.AF_INET, kind) as client:
        client.settimeout(60)
        client.connect(("127.0.0.1", found.getsockname()[1]))
        client.send(b"x")
        served = found.accept()[0] if kind is socket.SOCK_STREAM else found
        with served:
            served.settimeout(60)
            assert served.recv(1) == b"x"
