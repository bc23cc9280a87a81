"""Pickles in every place that a user can write to do not go off, and a run opens few sockets."""

import os
import re
import socket
import stat
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import pytest
from hostile import bomb

from elastic.system.addresses import node_address

# Every process of Python reads it at its start: a pickle that is read anywhere leaves a line.
WATCH = """
import os, sys, traceback
def watch(event, arguments):
    if event == "pickle.find_class":
        with open(os.environ["PICKLES"], "a") as file:
            file.write(f"{arguments} {''.join(traceback.format_stack())}")
sys.addaudithook(watch)
"""
LISTENS = "0A"  # of the states in /proc/net/tcp


@pytest.fixture
def flag(tmp_path):
    flag = tmp_path / "went-off"
    yield flag
    assert not flag.exists(), "a pickle was read"


def test_no_process_of_a_run_reads_a_pickle(drill, undisturbed, tmp_path):
    """Two nodes, a worker that is killed, checkpoints: every process tells what it unpickles, and
    none has anything to report. New interpreters are watched from their start, forks by the agent.
    """
    (tmp_path / "watch").mkdir()
    watch = tmp_path / "watch" / "sitecustomize.py"
    watch.write_text(WATCH)
    told = tmp_path / "pickles"
    env = {"PYTHONPATH": str(watch.parent), "DRILL_RUNS": str(watch), "PICKLES": str(told)}
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import pickle, pathlib\npickle.loads(pickle.dumps(pathlib.PurePosixPath('x')))\n")
    drill.start_script(recipe, env=env).ends_with(0)
    assert "find_class" in told.read_text() or "PurePosixPath" in told.read_text()
    told.unlink()

    drill.ends_like(undisturbed, *drill.start_two("--faults", "step 9 rank 1: kill", env=env))
    assert not told.exists(), told.read_text()


def test_a_run_listens_on_its_own_address_and_hides_its_files(drill, undisturbed, flag):
    """Two nodes at a step: every listening socket and every one for datagrams of every process, and
    who may open sockets, memory and folders in scratch. A stranger on the socket of an uploader is
    cut off, and the uploader goes on.
    """
    drill.shut(6)
    agents = drill.start_two()
    drill.stands(6, ranks=2)
    pids = drill.alive()
    assert len(pids) >= 2 * 4  # agent, fork server, uploader, worker
    own = node_address(os.environ)
    listening = {_host(line) for pid in pids for line in _lines(pid, "tcp", "tcp6") if line[3] == LISTENS}
    assert listening == {own}
    calls = {pid: [_host(line) for line in _lines(pid, "udp", "udp6")] for pid in pids}
    assert [calls.pop(agent.pid) for agent in agents] == [[own], [own]]
    assert not any(calls.values())
    for agent in agents:
        drill.uploader_serves(agent)
        path = Path(drill.socket_of_uploader(drill.uploader_of(agent)))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for bytes_ in (bomb(flag) + b"\n", b"[" * 60_000 + b"\n", b'{"entered": 1e99}\n'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(bytes_, str(path))
    names = {line[7] for pid in pids for line in _lines(pid, "unix") if len(line) > 7}
    assert not any(name.startswith("@") for name in names), "a name without a file has no owner"
    drill.open(6)
    drill.ends_like(undisturbed, *agents)


def _lines(pid, *tables):
    """The kernel's words about each socket of a process."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes |= set(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    texts = [Path(f"/proc/net/{table}").read_text() for table in tables]
    lines = [line.split() for text in texts for line in text.splitlines()[1:]]
    return [line for line in lines if inodes & set(line)]


def _host(line):
    """The kernel writes it as words of four bytes, each in this machine's order."""
    text = line[1].partition(":")[0]
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return str(ip_address(b"".join(words)))
