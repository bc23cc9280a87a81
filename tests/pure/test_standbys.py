"""When a standby is started, and who waits for its assignment in it."""

import json
import os
import threading
import urllib.request
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.agent import standbys
from elastic.agent.standbys import IDLE_S, SLOW_SCRIPT_S, Standbys
from elastic.config import environment
from elastic.config.environment import ASSIGNMENT, AWAITED, STORE
from elastic.config.options import Options
from elastic.testing.fakes import FakeClock

GB = 1 << 30


@pytest.mark.parametrize(
    ("case", "number"),
    [
        ({}, 1),  # the second one once the first waits
        ({"script_s": SLOW_SCRIPT_S - 0.5}, 0),
        ({"how": "on", "script_s": 0.1}, 1),
        ({"how": "off"}, 0),
        ({"device": "cuda"}, 0),
        ({"how": "on", "device": "cuda"}, 1),
        ({"free": 3 * GB - 1}, 0),  # a worker, and two snapshots
        ({"how": "on", "free": 0}, 1),
        ({"leaves": "SIGTERM"}, 0),
        ({"pids": (), "script_s": 0.1, "free": 2 * GB}, 1),  # a node that waits for others
    ],
)
def test_auto_starts_one_for_a_slow_script_and_free_memory(monkeypatch, tmp_path, case, number):
    """A node of two workers, which have trained a step after a script of `script_s`."""
    usual = {"how": "auto", "script_s": 3.0, "device": "cpu", "free": 4 * GB, "pids": (1, 2), "leaves": None}
    of, clock, started, begun = SimpleNamespace(**usual | case), FakeClock(), [], []
    monkeypatch.setattr(
        Standbys, "_start", lambda _self, rank: started.append(rank) or SimpleNamespace(waits=False)
    )
    monkeypatch.setattr(Standbys, "_look", lambda _self: None)
    monkeypatch.setattr(standbys, "resident_bytes", lambda _pid: GB)
    monkeypatch.setattr(standbys, "available_bytes", lambda: of.free)
    options = Options(recipe="r.py", run_dir=str(tmp_path), standby=of.how)
    parts = SimpleNamespace(
        settings=SimpleNamespace(options=options, nproc=2, declared=of, imports_library=True),
        page=SimpleNamespace(open_step=lambda _rank: begun[0] if begun else None, restored_step=0),
        memory=SimpleNamespace(slots=SimpleNamespace(capacity_bytes=GB)),
        shutdown=SimpleNamespace(reason=of.leaves),
        common_step=0,
        clock=clock,
    )
    found = Standbys(parts)
    found.begin(ran_anew=True)
    clock.sleep(of.script_s)
    begun.append(0)
    found.poll(of.pids)
    assert not started  # before a step was trained nothing is delayed
    parts.common_step = 1
    clock.sleep(IDLE_S)
    found.poll(of.pids)
    found.poll(of.pids)
    assert len(started) == number


@pytest.fixture
def standby(monkeypatch):
    """This process as a standby: the agent's end of its connection, and its audit hook."""
    (agent, ours), hooks = Pipe(), []
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, AWAITED)
    monkeypatch.setenv(STORE, "")
    monkeypatch.delenv(STORE)
    monkeypatch.setenv(ASSIGNMENT, str(os.dup(ours.fileno())))
    monkeypatch.setattr(environment, "_standby", [])
    monkeypatch.setattr(environment.sys, "addaudithook", hooks.append)
    environment.begin_standby()
    yield agent, hooks[0]
    os.environ.__class__ = environment._Awaiting.__base__


def test_who_reads_the_rank_waits_until_it_has_come(standby):
    """And nobody else. The store's descriptor is one of this process."""
    agent, _ = standby
    assert os.environ["HOME"] and "HOME" in os.environ and os.environ.get("NOTHING") is None
    assert isinstance(urllib.request.getproxies_environment(), dict)  # it walks over all
    found = []
    reader = threading.Thread(target=lambda: found.append((os.environ.get("RANK"), dict(os.environ))))
    reader.start()
    assert agent.recv_bytes() == b"waits" and environment.is_standby() and not found
    agent.send_bytes(json.dumps({"RANK": "3", "WORLD_SIZE": "4", STORE: ""}).encode())
    with Path(os.devnull).open() as store:
        send_handle(agent, store.fileno(), os.getpid())
    reader.join()
    rank, everything = found[0]
    assert (rank, everything["WORLD_SIZE"], environment.is_standby()) == ("3", "4", False)
    os.close(int(os.environ[STORE]))


@pytest.mark.parametrize(
    ("event", "args", "waits"),
    [
        ("open", ("there", "r", os.O_RDONLY), False),
        ("open", ("there", "w", os.O_WRONLY | os.O_TRUNC), True),
        ("open", ("there", "a", os.O_WRONLY | os.O_APPEND), False),
        ("open", ("empty", "w", os.O_WRONLY | os.O_TRUNC), False),  # as the files of locks are
        ("open", (3, "w", os.O_WRONLY), False),
        ("os.remove", ("made", -1), False),
        ("os.remove", (b"there", -1), True),
        ("os.rename", ("made", "there", -1, -1), True),
        ("os.rename", ("made", "new", -1, -1), False),
        ("shutil.rmtree", ("folder", None), True),
        ("subprocess.Popen", ("sh", ["sh"], None, None), True),
        ("socket.bind", (None, None), True),
    ],
)
def test_a_standby_waits_before_others_notice(standby, tmp_path, monkeypatch, event, args, waits):
    """It changes no file that it has not made, starts no process, and takes no port."""
    waited = []
    monkeypatch.setattr(environment, "_await_assignment", lambda: waited.append(event))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("x")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    _, hook = standby
    hook("open", ("made", "w", os.O_WRONLY | os.O_CREAT))
    (tmp_path / "made").write_text("x")
    assert not waited
    hook(event, args)
    assert bool(waited) == waits
