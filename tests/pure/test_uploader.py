"""A real uploader process saves every offer, although clients die and the owner exits."""

import errno
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import run_records
from gates import wait_for
from payloads import bytes_of, hashes_of, payload_of
from shown_generation import Rendezvous

from elastic.checkpoint.catalog import list_commits
from elastic.errors import EXIT_FAILED, UsageError
from elastic.observe.log import EventLog
from elastic.snapshot import checksum
from elastic.snapshot.slots import _LEASES, SnapshotInfo, SnapshotSlots
from elastic.storage.remote import open_store
from elastic.system import stop_signals
from elastic.system.clock import SystemClock
from elastic.testing.fakes import FakeClock
from elastic.uploader import client, fence, main
from elastic.uploader.client import Handover, UploaderProcess, listen, offer
from elastic.uploader.fence import FencePage
from elastic.uploader.main import Uploader, serve
from elastic.uploader.protocol import SaveResult, SaveState, UploaderConfig

LIMIT_S = 60.0
LARGE_BYTES = 5_000_000


@pytest.fixture
def rendezvous():
    return Rendezvous(1)


@pytest.fixture
def page(rendezvous):
    with closing(FencePage(rendezvous)) as page:
        yield page


@pytest.fixture
def config(tmp_path, page):
    """Of an uploader in this process, whose parent is the one of the tests."""
    return UploaderConfig(
        run_url=str(tmp_path / "run"),
        scratch=str(tmp_path),
        run_id="r",
        node="n0",
        keep=10,
        save_deadline_s=LIMIT_S,
        fence=page.fds,
        owner=os.getppid(),
    )


@pytest.fixture
def slots():
    with closing(SnapshotSlots.create(LARGE_BYTES, 8)) as slots:
        yield slots


def image_of(step, data_bytes=64):
    return payload_of(bytes([step]) * data_bytes, step=step)


def keep(slots, step, data=None, generation=1, **fields):
    data = image_of(step) if data is None else data
    slot = slots.begin()
    slots.body(slot)[: len(data)] = data
    info = SnapshotInfo(step=step, generation=generation, **fields)
    return slots.publish(slot, size_bytes=len(data), info=info)


def hand_over(config, slots, step, data=None, *, final=False, generation=1):
    snapshot = keep(slots, step, data, generation)
    return offer(config.socket_path, slots, snapshot, resumed_from=None, final=final)


def state_of(handover):
    return handover.wait(LIMIT_S).state


def committed_steps(config):
    records, damages = list_commits(open_store(config.run.checkpoints_url), SystemClock())
    assert damages == []
    return [record.step for record in records]


class Hold:
    """A save stands still before the record of its checkpoint."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()

    def at(self, point, step):
        if point == "before-commit":
            self.reached.set()
            assert self.go_on.wait(LIMIT_S)

    def holds(self, handover):
        assert self.reached.wait(LIMIT_S)
        return handover

    def release(self, handover):
        """The result of the save; the next one is held again."""
        self.go_on.set()
        result = handover.wait(LIMIT_S)
        self.reached.clear()
        self.go_on.clear()
        return result


@contextmanager
def in_thread(config, *, holds=True):
    """The uploader's loop in this process, so that a test can hold up its saves."""
    hold, (owner_fd, owner_end) = Hold(), os.pipe()
    if not holds:
        hold.go_on.set()
    with listen(config.socket_path) as offers:
        words = (replace(config, offers=offers.fileno()), owner_fd, hold.at)
        thread = threading.Thread(target=serve, args=words, daemon=True)
        thread.start()
        yield hold
        hold.go_on.set()
        os.close(owner_end)
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    os.close(owner_fd)


def told(config, *fields):
    return [tuple(each[name] for name in fields) for each in run_records.events(config.run.events)]


def test_it_starts_without_torch():
    """Imports the module in a fresh interpreter: torch would cost seconds at every start."""
    code = "import sys, elastic.uploader.main, elastic.uploader.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_offer_is_committed_answered_and_logged(config, slots):
    """The ordinary way: offer, wait for the answer, look into the store and the event log.

    A terminal's Ctrl-C and a kill of the whole group reach it: its owner alone ends it.
    """
    process = UploaderProcess(replace(config, owner=os.getpid()))
    for number in stop_signals.ALL:
        os.kill(process.pid, number)
    data = image_of(7, LARGE_BYTES // 2)
    digest = hashes_of(data).digest
    hand_over(config, slots, 6, image_of(6))
    result = hand_over(config, slots, 7, data, final=True).wait(LIMIT_S)
    assert (result.state, result.digest) == (SaveState.COMMITTED, digest)
    assert 0.0 < result.cpu_s < LIMIT_S
    store = open_store(config.run.checkpoints_url)
    (record, *_), _ = list_commits(store, SystemClock())
    assert (record.step, record.digest, record.size_bytes) == (7, digest, len(data))
    assert record.checksum == checksum.of_image(memoryview(data))
    assert bytes_of(store, record, SystemClock()) == data
    assert process.stop(LIMIT_S)
    assert told(config, "event", "step", "generation", "size_bytes", "digest")[-1] == (
        *("checkpoint_committed", 7, 1, len(data)),
        digest,
    )


def test_an_unknown_protocol_is_refused_by_the_owner(config):
    with pytest.raises(UsageError, match="expected a path or a URL"):
        UploaderProcess(replace(config, run_url="s33://b/c"))


def test_the_newest_of_those_that_wait_is_saved_next(config, slots):
    """Step 1 is held before its commit record while others are offered; of those one is written
    over meanwhile.
    """
    with in_thread(config) as uploader:
        first = uploader.holds(hand_over(config, slots, 1))
        gone, second, third = (hand_over(config, slots, step, final=True) for step in (2, 3, 4))
        slots.invalidate(1)
        uploader.go_on.set()
        results = [each.wait(LIMIT_S) for each in (first, gone, second, third)]
    assert [each.state.value for each in results] == ["committed", "failed", "dropped", "committed"]
    assert "step 4" in results[2].reason
    assert committed_steps(config) == [4, 1]
    assert all(slots.lease(each.slot, each.seq) for each in slots.whole())
    assert [slots._word(slot, _LEASES) for slot in range(4)] == [1, 0, 1, 1]


def test_a_save_is_fenced_by_a_generation_without_its_node(config, page, rendezvous, slots, monkeypatch):
    """Step 1 is held before its record while generation 2 begins with this node in it; step 2 while
    3 begins without it. Only a state of generation 3 is committed then.
    """
    monkeypatch.setattr(fence, "ENTERING_S", 0.1)
    with in_thread(config) as uploader:
        for step, newest, state in (1, 2, SaveState.COMMITTED), (2, 3, SaveState.FENCED):
            handover = uploader.holds(hand_over(config, slots, step, generation=1))
            rendezvous.newest = newest
            page.enter(2)
            assert uploader.release(handover).state is state
        assert uploader.release(hand_over(config, slots, 2, generation=3)).state is SaveState.COMMITTED
    assert committed_steps(config) == [2, 1]
    assert page.last_commit == (2, 2)
    names = ("checkpoint_committed", "checkpoint_fenced", "checkpoint_committed")
    assert told(config, "event", "generation") == [*zip(names, (1, 1, 3), strict=True)]


@pytest.mark.parametrize("dies", ["in its save", "before it reads the offer"])
def test_an_offer_outlives_its_uploader_and_a_save_is_made_anew(config, slots, dies, monkeypatch):
    """A save in hand is lost, and says so; an offer that waits is the next uploader's."""
    monkeypatch.setattr(client, "RESTART_S", 0.0)
    faults = "checkpoint 1 before-commit: kill uploader" if dies == "in its save" else None
    process = UploaderProcess(replace(config, owner=os.getpid(), faults=faults))
    if faults is None:
        os.kill(process.pid, signal.SIGSTOP)
    handover = hand_over(config, slots, 1, final=True)
    if dies == "in its save":
        assert state_of(handover) is SaveState.LOST
    else:
        os.kill(process.pid, signal.SIGKILL)
    said, ended = [], threading.Event()
    watch = threading.Thread(target=process.revive_until, args=(ended, said.append))
    watch.start()
    wait_for(lambda: said, "another uploader")
    ended.set()
    watch.join()
    assert "the uploader died (killed by SIGKILL)" in said[0]
    if dies == "in its save":
        slots.release_all()
        handover = offer(config.socket_path, slots, slots.whole()[0], resumed_from=None, final=True)
    assert state_of(handover) is SaveState.COMMITTED
    assert process.stop(LIMIT_S)


def test_nothing_is_saved_in_another_runs_directory(config, tmp_path, slots):
    """It is moved during an upload, which goes on in a new folder; then another run has the name.

    No fence stops this save: as in etcd, where that run has a group of its own.
    """
    uid = tmp_path / "run" / "uid"
    uid.parent.mkdir()
    uid.write_text("ours")
    with in_thread(replace(config, uid="ours")) as uploader:
        handover = uploader.holds(hand_over(config, slots, 1))
        uid.unlink()
        assert uploader.release(handover).state is SaveState.COMMITTED
        handover = uploader.holds(hand_over(config, slots, 2))
        uid.write_text("theirs")
        result = uploader.release(handover)
    assert result.state is SaveState.FAILED and "another run has begun there" in result.reason
    assert committed_steps(config) == [1]


def test_another_state_of_a_committed_step_ends_all_saves(config, slots, capfd):
    """Another launch has committed step 7. The second offer, whose client leaves at once, is not
    heard of; the third one's client learns of it.
    """
    with in_thread(config, holds=False):
        assert state_of(hand_over(config, slots, 7)) is SaveState.COMMITTED
        hand_over(config, slots, 7, image_of(8)).close()
        wait_for(lambda: len(told(config)) == 2, "two saves")
        result = hand_over(config, slots, 8).wait(LIMIT_S)
        assert result.state is SaveState.DIFFERS
        assert "step 7 was already committed by generation 1 with another state" in result.reason
    assert committed_steps(config) == [7]
    names = ("checkpoint_committed", "checkpoint_differs", "checkpoint_differs")
    assert told(config, "event", "step") == [*zip(names, (7, 7, 8), strict=True)]
    assert capfd.readouterr().err.count("with another state") == 1


def test_a_save_that_fails_is_answered_and_logged(config, tmp_path, slots):
    """The run directory is a file: no checkpoint can be made. Then a snapshot is not what was
    published, and another is no image. The uploader goes on serving.
    """
    (tmp_path / "run").write_text("not a folder")
    with in_thread(config, holds=False):
        assert state_of(hand_over(config, slots, 1)) is SaveState.FAILED
        (tmp_path / "run").unlink()
        for published, data in ((checksum.of_image(memoryview(image_of(3))), image_of(2)), ("", b"none")):
            snapshot = keep(slots, 2, data, checksum=published)
            handover = offer(config.socket_path, slots, snapshot, resumed_from=None, final=False)
            assert state_of(handover) is SaveState.FAILED
        assert state_of(hand_over(config, slots, 2)) is SaveState.COMMITTED
    assert told(config, "event") == [("checkpoint_failed",)] * 3 + [("checkpoint_committed",)]


def test_a_snapshot_that_is_written_over_is_not_committed(config):
    """Between payload and record its lease is lost, as when the owner takes this uploader for dead,
    and the slot is written.
    """
    slots = SnapshotSlots.create(4096, 1)
    with in_thread(config) as uploader:
        handover = uploader.holds(hand_over(config, slots, 1))
        assert slots.begin() is None
        slots.release_all()
        keep(slots, 2)
        result = uploader.release(handover)
        assert (result.state, result.digest) == (SaveState.FAILED, "")
        assert "written over" in result.reason
    assert open_store(config.run.checkpoints_url).list() == []


@pytest.mark.parametrize("change", [{"slot": 7}, {"seq": 2}, {"seq": 6}])
def test_an_offer_of_a_gone_snapshot_gives_no_lease_back(config, change):
    """The one slot is leased, and held another snapshot before."""
    slots = SnapshotSlots.create(4096, 1)
    keep(slots, 1)
    there = keep(slots, 2)
    assert slots.lease(there.slot, there.seq)
    with in_thread(config, holds=False):
        gone = replace(there, **change)
        result = offer(config.socket_path, slots, gone, resumed_from=None, final=False).wait(LIMIT_S)
    assert result.state is SaveState.FAILED and "written over" in result.reason
    assert slots.begin() is None


@pytest.mark.parametrize("error", [None, BlockingIOError(errno.EAGAIN, "no process left")])
def test_an_uploader_that_keeps_dying_is_started_at_intervals(config, monkeypatch, error):
    """It ends at its start, or cannot be started."""
    clock, started, said = FakeClock(), [], []

    def spawn(_config):
        started.append(clock.now)
        if error is not None and len(started) > 1:
            raise error
        return SimpleNamespace(pid=1, stdin=None, poll=lambda: 2)

    monkeypatch.setattr(client, "_spawn", spawn)
    process = UploaderProcess(config, clock=clock)
    process._offers.close()
    for _ in range(100):
        said += filter(None, [process.revive()])
        clock.now += 0.5
    pauses = {after - before for before, after in itertools.pairwise(started)}
    assert pauses == {client.RESTART_S} and len(said) == len(started) - 1
    assert all(each.startswith("exit code 2") for each in said)
    assert all(("no process left" in each) is (error is not None) for each in said)


@pytest.mark.parametrize(
    ("hangs_in", "owner_lives", "limits_s", "ends"),
    [
        ("nothing", False, [LIMIT_S, LIMIT_S], (True, "committed")),
        ("save", True, [0.0], (False, "failed")),
        ("prune", True, [LIMIT_S, 0.0], (False, "committed")),
    ],
)
def test_a_hanging_storage_keeps_no_uploader(
    config, slots, monkeypatch, *, hangs_in, owner_lives, limits_s, ends
):
    """A save that was committed before old checkpoints are deleted has not failed. An offer from
    before its owner's end is saved.
    """
    go_on, limits = threading.Event(), iter(limits_s)

    def call(name, result=None):
        assert name != hangs_in or go_on.wait(LIMIT_S)
        return result

    class Results(main.SimpleQueue):
        def get(self, timeout):
            return super().get(timeout=next(limits))

    monkeypatch.setattr(main, "SimpleQueue", Results)
    committed = SaveResult(step=1, state=SaveState.COMMITTED, reason="", is_ours=True)
    saver = SimpleNamespace(save=lambda *_words: call("save", committed), prune=lambda _offer: call("prune"))
    owner_fd, owner_end = os.pipe()
    if not owner_lives:
        os.close(owner_end)
    with listen(config.socket_path) as offers:
        handover = hand_over(config, slots, 1)
        log = EventLog(config.run.events / "log", node="n0", clock=SystemClock())
        end = Uploader(saver, config, log, offers, owner_fd).run()
    os.close(owner_fd)
    assert (end, state_of(handover)) == ends
    assert slots._word(0, _LEASES) == 0
    go_on.set()


@pytest.mark.parametrize("owner_lives", [True, False])
def test_an_uploader_whose_storage_hangs_begins_anew(config, monkeypatch, *, owner_lives):
    """A thread in a call that hangs cannot be ended, and would hold up all later saves."""
    begun = []
    monkeypatch.setattr(main, "serve", lambda *_words: False)
    monkeypatch.setattr(main, "_is_readable", lambda _fd: not owner_lives)
    monkeypatch.setattr(main.os, "execv", lambda *words: begun.append(words))
    monkeypatch.setattr(main.stop_signals, "ignore", lambda: None)
    assert main.main([json.dumps(asdict(config))]) == EXIT_FAILED
    assert begun == [(sys.executable, sys.orig_argv)] * owner_lives


def test_a_malformed_offer_cuts_off_its_client_only(config, slots):
    """One client sends an offer that says nothing, another none of the memory, a third a file
    without slots; the next one's save is committed as if nothing had happened.
    """
    fd = os.memfd_create("image")
    whole = {"step": 1, "generation": 1, "slot": 0, "seq": 2, "resumed_from": None, "is_final": False}
    with in_thread(config, holds=False):
        for malformed, fds in (({"step": 1}, [fd]), (whole, []), (whole, [fd])):
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, theirs:
                sender.connect(config.socket_path)
                socket.send_fds(sender, [json.dumps(malformed).encode()], [*fds, theirs.fileno()])
            assert state_of(Handover(ours, 1)) is SaveState.LOST
        assert state_of(hand_over(config, slots, 2)) is SaveState.COMMITTED
    os.close(fd)
