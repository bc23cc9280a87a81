"""A peer sees the end of a connection although a child of the process that closed it lives on."""

import os
import select
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from elastic.system.forked_child import closing_with_this_process

FOR_EVER = "import sys; sys.stdin.read()"


@contextmanager
def forked_child():
    read, write = os.pipe()
    if not os.fork():
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    yield
    os.close(write)
    os.wait()


@contextmanager
def program():
    """A program that inherits all that may be inherited, as one that os.system starts."""
    process = subprocess.Popen([sys.executable, "-c", FOR_EVER], stdin=subprocess.PIPE, close_fds=False)
    yield
    process.communicate()


@pytest.mark.parametrize("child", [forked_child, program])
@pytest.mark.parametrize("is_own", [True, False])
def test_a_connection_ends_with_its_process_though_a_child_lives(child, is_own):
    """The sockets may be inherited, as those of torch's groups. Others, the recipe's, are."""
    listening = socket.create_server(("127.0.0.1", 0))
    with closing_with_this_process():
        mine = socket.create_connection(listening.getsockname())
        mine.set_inheritable(True)
    peer, _ = listening.accept()
    others = socket.create_connection(listening.getsockname())
    others.set_inheritable(True)
    other_peer, _ = listening.accept()

    with child():
        (mine if is_own else others).close()
        seen, _, _ = select.select([peer if is_own else other_peer], [], [], 10 if is_own else 0)
        assert bool(seen) is is_own

    for each in (mine, others, peer, other_peer, listening):
        each.close()


def test_a_descriptor_that_is_used_anew_is_left_to_the_child():
    """The library has closed its socket, and the recipe opened a file in its place."""
    read, write = os.pipe()
    with closing_with_this_process():
        ours, theirs = socket.socketpair()
    number = ours.fileno()
    os.dup2(write, number)
    child = os.fork()
    if not child:
        os.write(number, b"x")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    ours.close()
    assert os.read(read, 2) == b"x"
    os.close(read)
    theirs.close()
