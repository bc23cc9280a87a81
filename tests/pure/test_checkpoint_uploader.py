"""A real uploader process saves every offer, although clients die and the owner exits."""

import errno
import itertools
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_records
from committed import commit_image
from hypothesis import given
from hypothesis import strategies as st
from payloads import bytes_of

from elastic.agent.final_checkpoint import FinalCheckpoint
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.checkpoint import record as commit_record
from elastic.checkpoint.catalog import list_commits
from elastic.checkpoint.payload_check import check_state
from elastic.checkpoint.record import commit_name
from elastic.errors import CannotStart, StoreFailed, UsageError
from elastic.observe.log import EventLog
from elastic.snapshot import checksum, image_hash, safetensors_header
from elastic.snapshot.slots import _LEASES, SnapshotInfo, SnapshotSlots
from elastic.storage.remote import open_store
from elastic.storage.store import StoreUnavailable
from elastic.system import stop_signals
from elastic.system.clock import SystemClock
from elastic.system.files import replace_whole
from elastic.system.leave_page import LeavePage
from elastic.testing.fakes import FakeClock, FakeStore
from elastic.uploader import client, save
from elastic.uploader.client import UploaderClient, UploaderProcess
from elastic.uploader.jobs import MOST_WAITING, OVERTIME_S, Job, Jobs, enqueue
from elastic.uploader.main import Uploader, _listen, serve
from elastic.uploader.protocol import Offer, SaveResult, SaveState, UploaderConfig, parse_request

LIMIT_S = 60.0
LARGE_BYTES = 5_000_000


@pytest.fixture
def config(tmp_path):
    (tmp_path / "fence").write_text("1\n")
    return UploaderConfig(
        checkpoints_url=str(tmp_path / "run" / "checkpoints"),
        run_id="r",
        node="n0",
        keep=10,
        save_deadline_s=LIMIT_S,
        socket_path=str(tmp_path / "u.sock"),
        events_path=str(tmp_path / "events" / "uploader.jsonl"),
        fence=f"file:{tmp_path / 'fence'}",
        faults_path=str(tmp_path / "faults"),
    )


@pytest.fixture
def process(config):
    process = UploaderProcess.start(config)
    process.wait_ready()
    yield process
    process.stop(LIMIT_S)


@pytest.fixture
def slots():
    slots = SnapshotSlots.create(LARGE_BYTES, 8)
    yield slots
    slots.close()


def info(step, generation=1):
    return SnapshotInfo(step=step, epoch=0, generation=generation, world_size=1, torch="2")


def image_of(step, data_bytes=64):
    """As image.py writes it, without torch."""
    entry = {"dtype": "U8", "shape": [data_bytes], "data_offsets": [0, data_bytes]}
    metadata = {
        safetensors_header.DOCUMENT: json.dumps({"state": {"step": step}}),
        safetensors_header.TIES: "{}",
    }
    header = json.dumps({"__metadata__": metadata, "x": entry}).encode()
    return safetensors_header.LENGTH.pack(len(header)) + header + bytes([step % 256]) * data_bytes


def keep(slots, step, data=None, generation=1):
    data = image_of(step) if data is None else data
    slot = slots.begin()
    slots.body(slot)[: len(data)] = data
    return slots.publish(slot, size_bytes=len(data), info=info(step, generation))


def hand_over(uploads, slots, step, data=None, *, final=False, generation=1):
    snapshot = keep(slots, step, data, generation)
    uploads.offer(slots, snapshot, resumed_from=None, final=final)
    return snapshot


def meta_of(step, generation=1):
    where = {"slot": 0, "seq": 2, "offset": 8192, "size_bytes": 10}
    of_state = {"step": step, "epoch": 0, "generation": generation, "world_size": 1, "torch": "2"}
    return of_state | where | {"resumed_from": None, "is_final": False}


def committed_steps(config):
    records, damages = list_commits(open_store(config.checkpoints_url), SystemClock())
    assert damages == []
    return [record.step for record in records]


class InThread:
    """The uploader's loop in this process, so that a test can hold up a save at a point of the
    commit protocol.
    """

    def __init__(self, config):
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self._owner_fd, self._owner_end = os.pipe()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(config,), daemon=True)
        self.is_done = None

    def _serve(self, config):
        self.is_done = serve(config, self._owner_fd, reached=self._hold, ready=self._is_ready.set)

    def _hold(self, point, step):
        if point == "before-commit":
            self.reached.set()
            assert self.go_on.wait(LIMIT_S)

    def __enter__(self):
        self._thread.start()
        assert self._is_ready.wait(LIMIT_S)
        return self

    def leave(self):
        if self._owner_end is not None:
            os.close(self._owner_end)
            self._owner_end = None

    def __exit__(self, *error):
        self.go_on.set()
        self.leave()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        os.close(self._owner_fd)


def test_it_starts_without_torch():
    """Imports the module in a fresh interpreter: torch would cost seconds at every start."""
    code = "import sys, elastic.uploader.main, elastic.uploader.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_offer_is_committed_answered_and_logged(config, process, tmp_path, slots):
    """The ordinary way: offer, wait for the answer, look into the store and the event log."""
    uploads = UploaderClient(config.socket_path)
    data = image_of(7, LARGE_BYTES // 2)
    digest = image_hash.digest(data)
    hand_over(uploads, slots, 6, image_of(6))
    hand_over(uploads, slots, 7, data, final=True)
    result = uploads.wait(7, LIMIT_S)
    assert (result.state, result.digest) == (SaveState.COMMITTED, digest)
    assert 0.0 < result.cpu_s < LIMIT_S
    store = open_store(config.checkpoints_url)
    (record, *_), _ = list_commits(store, SystemClock())
    assert (record.step, record.digest, record.size_bytes) == (7, digest, len(data))
    assert bytes_of(store, record, SystemClock()) == data
    assert process.stop(LIMIT_S)
    event = run_records.events(tmp_path / "events")[-1]
    assert [event[name] for name in ("event", "step", "generation", "size_bytes", "digest")] == [
        "checkpoint_committed",
        7,
        1,
        len(data),
        digest,
    ]


CLIENT = """
import os, signal, sys
from elastic.uploader.client import UploaderClient
from elastic.snapshot.slots import SnapshotSlots
slots = SnapshotSlots.open(sys.argv[2])
UploaderClient(sys.argv[1]).offer(slots, slots.newest(), resumed_from=None, final=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_client_that_is_killed_after_its_offer_is_saved_all_the_same(config, process, slots):
    """A process offers a snapshot in memory of another process, and kills itself at once."""
    keep(slots, 3, image_of(3, LARGE_BYTES // 2))
    command = [sys.executable, "-c", CLIENT, config.socket_path, slots.path]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert process.stop(LIMIT_S)
    assert committed_steps(config) == [3]


def test_the_end_of_the_owners_pipe_finishes_the_saves_and_ends_the_process(config, process, slots):
    """The owner exits right after the offers: both saves are finished, and the exit code is 0."""
    uploads = UploaderClient(config.socket_path)
    hand_over(uploads, slots, 1, image_of(1, LARGE_BYTES // 2))
    hand_over(uploads, slots, 2, final=True)
    assert process.stop(LIMIT_S)
    assert committed_steps(config) == [2, 1]
    assert [result.state for result in uploads.poll()] == [SaveState.COMMITTED] * 2


def test_an_uploader_starts_beside_a_thousand_open_files(config):
    """Of a recipe that reads shards, where a process may have so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"a process may open {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        process = UploaderProcess.start(config)
        process.wait_ready()
        process.stop(LIMIT_S)
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_terminals_signals_do_not_end_it(config, process, slots):
    """Ctrl-C and a kill of the whole group reach it; the owner alone decides when it leaves."""
    for number in stop_signals.ALL:
        os.kill(process.pid, number)
    uploads = UploaderClient(config.socket_path)
    hand_over(uploads, slots, 1)
    assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED


def test_a_killed_uploader_is_a_failed_save_and_an_error_at_the_next_offer(config, process, slots):
    """SIGKILL with an offer unanswered or answered: afterwards the client is never left waiting."""
    uploads = UploaderClient(config.socket_path)
    hand_over(uploads, slots, 1)
    os.kill(process.pid, signal.SIGKILL)
    process.stop(LIMIT_S)
    assert uploads.wait(1, LIMIT_S).state in {SaveState.COMMITTED, SaveState.LOST}
    with pytest.raises(StoreFailed, match="expected an uploader"):
        hand_over(uploads, slots, 2)
    assert not process.enter(1)


def test_a_restarted_uploader_serves_the_same_client(config, process, slots):
    """The owner replaces a killed uploader on the same path; the client's next offer finds it."""
    uploads = UploaderClient(config.socket_path)
    hand_over(uploads, slots, 1)
    uploads.wait(1, LIMIT_S)
    os.kill(process.pid, signal.SIGKILL)
    process.stop(LIMIT_S)
    successor = UploaderProcess.start(config)
    successor.wait_ready()
    hand_over(uploads, slots, 2)
    assert uploads.wait(2, LIMIT_S).state is SaveState.COMMITTED
    assert successor.stop(LIMIT_S)


def test_an_owner_that_can_start_no_uploader_ends_with_a_sentence(config, monkeypatch):
    def refuse(*_words, **_options):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(client, "_spawn", refuse)
    with pytest.raises(CannotStart, match="no process can be started for the uploader"):
        UploaderProcess.start(config)


def test_an_unknown_protocol_is_reported_to_the_owner(config):
    """The process cannot serve; its owner gets the sentence instead of silence."""
    bad = UploaderConfig(
        **{name: getattr(config, name) for name in config.__slots__} | {"checkpoints_url": "s33://b/c"}
    )
    process = UploaderProcess.start(bad)
    with pytest.raises(UsageError, match="expected a path or a URL"):
        process.wait_ready()
    assert not process.stop(LIMIT_S)


def test_a_newer_save_takes_the_place_of_one_that_waits(config, slots):
    """Step 1 is held before its commit record; of 2, 3 (final) and 4, which wait, only 2 may be
    dropped, and 4 falls to 5.
    """
    uploads = UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        hand_over(uploads, slots, 1)
        assert uploader.reached.wait(LIMIT_S)
        hand_over(uploads, slots, 2)
        hand_over(uploads, slots, 3, final=True)
        assert uploads.wait(2, LIMIT_S).state is SaveState.DROPPED
        hand_over(uploads, slots, 4)
        hand_over(uploads, slots, 5)
        assert "step 5" in uploads.wait(4, LIMIT_S).reason
        uploader.go_on.set()
        assert [uploads.wait(step, LIMIT_S).state for step in (1, 3, 5)] == [SaveState.COMMITTED] * 3
    assert committed_steps(config) == [5, 3, 1]


def test_a_save_that_is_fenced_during_its_upload_is_not_committed(config, tmp_path, slots, monkeypatch):
    """The newest generation grows to 2 while generation 1 is between payload and record."""
    monkeypatch.setattr(save, "ENTERING_S", 0.0)
    uploads = UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        hand_over(uploads, slots, 1, generation=1)
        assert uploader.reached.wait(LIMIT_S)
        (tmp_path / "fence").write_text("2\n")
        uploader.go_on.set()
        assert uploads.wait(1, LIMIT_S).state is SaveState.FENCED
        hand_over(uploads, slots, 1, generation=2)
        assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED
    assert committed_steps(config) == [1]
    assert [(e["event"], e["generation"]) for e in run_records.events(tmp_path / "events")] == [
        ("checkpoint_fenced", 1),
        ("checkpoint_committed", 2),
    ]


def test_nothing_is_saved_in_a_run_directory_that_became_another_runs(config, tmp_path, slots):
    """It is moved during an upload, which goes on in a new folder; then another run has the name.

    No fence stops this save: as in etcd, where that run has a group of its own.
    """
    run = tmp_path / "run"
    config = replace(config, run_url=str(run), uid="ours")
    run.mkdir()
    (run / "uid").write_text("ours")
    uploads = UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        hand_over(uploads, slots, 1)
        assert uploader.reached.wait(LIMIT_S)
        (run / "uid").unlink()
        uploader.go_on.set()
        assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED
        uploader.reached.clear()
        uploader.go_on.clear()
        hand_over(uploads, slots, 2)
        assert uploader.reached.wait(LIMIT_S)
        (run / "uid").write_text("theirs")
        uploader.go_on.set()
        result = uploads.wait(2, LIMIT_S)
    assert result.state is SaveState.FAILED and "another run has begun there" in result.reason
    assert committed_steps(config) == [1]


def test_a_step_that_was_committed_with_another_state_is_said_aloud_and_ends_all_saves(
    config, tmp_path, slots, capfd, wait_until
):
    """Another launch has committed step 7. The second offer, whose client leaves at once, is not
    heard of; the third one's client learns of it.
    """
    uploads, owner = UploaderClient(config.socket_path), UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        uploader.go_on.set()
        hand_over(uploads, slots, 7)
        assert uploads.wait(7, LIMIT_S).state is SaveState.COMMITTED
        hand_over(owner, slots, 7, image_of(8))
        owner.close()
        wait_until(lambda: len(run_records.events(tmp_path / "events")) == 2)
        hand_over(uploads, slots, 8)
        result = uploads.wait(8, LIMIT_S)
        assert result.state is SaveState.DIFFERS
        assert "step 7 was already committed by generation 1 with another state" in result.reason
    assert committed_steps(config) == [7]
    events = [(e["event"], e["step"]) for e in run_records.events(tmp_path / "events")]
    assert events == [("checkpoint_committed", 7), ("checkpoint_differs", 7), ("checkpoint_differs", 8)]
    assert capfd.readouterr().err.count("with another state") == 1


def test_a_good_state_is_not_given_up_for_a_committed_one_that_does_not_load(config, slots):
    """Its bytes are those of its record, and another state than the record says: a bit flipped in
    the memory of its writer, before the payload was hashed. The run was to end, because the two
    differ.
    """
    uploads, store = UploaderClient(config.socket_path), open_store(config.checkpoints_url)
    with InThread(config) as uploader:
        uploader.go_on.set()
        hand_over(uploads, slots, 7)
        assert uploads.wait(7, LIMIT_S).state is SaveState.COMMITTED
        name, record = commit_name(7), list_commits(store, SystemClock())[0][0]
        store.delete(name)
        assert store.create(name, replace(record, digest="0" * 64).to_json())
        hand_over(uploads, slots, 7)
        result = uploads.wait(7, LIMIT_S)
    assert result.state is SaveState.COMMITTED
    assert result.is_ours
    newest = list_commits(store, SystemClock())[0][0]
    check_state(store, newest, SystemClock())


def test_a_node_that_leaves_learns_that_its_last_step_is_committed_with_another_state(
    config, tmp_path, slots
):
    """Its exit code must not be the one of a step that is saved. The store that it asks is empty,
    as a listing would show it that is older than the commit; then it shows the commit.
    """
    uploads, said = UploaderClient(config.socket_path), []
    with InThread(config) as uploader:
        uploader.go_on.set()
        hand_over(uploads, slots, 7)
        assert uploads.wait(7, LIMIT_S).state is SaveState.COMMITTED
        same = keep(slots, 7, image_of(7))
        same = replace(same, info=replace(same.info, checksum=checksum.of_image(memoryview(image_of(7)))))
        other = keep(slots, 7, image_of(8))
        other = replace(other, info=replace(other.info, checksum=checksum.of_image(memoryview(image_of(8)))))
        for store, newest, differs in (
            (FakeStore(), other, True),
            (open_store(config.checkpoints_url), other, True),
            (open_store(config.checkpoints_url), same, False),
        ):
            final = FinalCheckpoint(
                memory=SimpleNamespace(slots=slots, newest=newest),
                store=store,
                run_id="r",
                uploader_socket=config.socket_path,
                shutdown=ShutdownRequest(LeavePage(LIMIT_S), SystemClock()),
                clock=SystemClock(),
                report=said.append,
                log=EventLog(tmp_path / "events" / "a-agent.jsonl", node="a", clock=SystemClock()),
            )
            final.ensure_committed(others=False)
            assert len(final.differences) == differs
            if differs:
                assert (
                    "step 7 was already committed by generation 1 with another state" in final.differences[0]
                )
    assert said == []
    assert [e["event"] for e in run_records.events(tmp_path / "events")].count("checkpoint_differs") == 2


@pytest.mark.parametrize("passed_over", [7, 9])
def test_a_node_that_leaves_relies_on_no_checkpoint_that_its_run_passed_over(
    config, tmp_path, slots, passed_over
):
    """It is damaged, and generation 2 fell back behind it and is at step 7 now."""
    uploads, said, store = UploaderClient(config.socket_path), [], open_store(config.checkpoints_url)
    with InThread(config) as uploader:
        uploader.go_on.set()
        hand_over(uploads, slots, passed_over)
        assert uploads.wait(passed_over, LIMIT_S).state is SaveState.COMMITTED
        (record,), _ = list_commits(store, SystemClock())
        payload = Path(config.checkpoints_url) / record.payload
        data = bytearray(payload.read_bytes())
        data[-1] ^= 1
        payload.write_bytes(data)
        (tmp_path / "fence").write_text("2\n")
        final = FinalCheckpoint(
            memory=SimpleNamespace(slots=slots, newest=keep(slots, 7, generation=2)),
            store=store,
            run_id="r",
            uploader_socket=config.socket_path,
            shutdown=ShutdownRequest(LeavePage(LIMIT_S), SystemClock()),
            clock=SystemClock(),
            report=said.append,
            log=EventLog(tmp_path / "events" / "a-agent.jsonl", node="a", clock=SystemClock()),
        )
        if passed_over == 9:
            assert final.newest_checkpoint(step=7, generation=2) is None
            assert final.newest_checkpoint(step=0, generation=2) == record
        else:  # as for a node without memory for its state, which examined nothing
            assert final.newest_checkpoint(step=7, generation=2, is_new=True) is None
        final.ensure_committed(others=False)
    newest = final.newest_checkpoint(step=7, generation=2, is_new=True)
    assert (newest.step, newest.generation) == (7, 2)
    assert said == final.differences == []


def test_the_last_step_counts_as_saved_also_where_the_listing_is_older(slots):
    """An object store shows step 6, and gives the record of step 7 to those who ask for it by name:
    a run would be recorded as complete at another step than its last one.
    """
    store = FakeStore()
    for step in (6, 7):
        commit_image(store, "r", step, bytearray(image_of(step)))
    listing = [each for each in store.list() if "6/" in each.name]
    store.list = lambda: listing
    final = FinalCheckpoint(
        memory=SimpleNamespace(slots=None, newest=None),
        store=store,
        run_id="r",
        uploader_socket="/nonexistent",
        shutdown=ShutdownRequest(LeavePage(LIMIT_S), FakeClock()),
        clock=FakeClock(),
        report=None,
        log=None,
    )
    assert final.newest_checkpoint(step=7, generation=2).step == 7
    assert final.newest_checkpoint(step=8, generation=2).step == 6


def test_a_store_that_is_away_holds_up_no_node_beyond_its_grace(slots):
    """Each listing fails after three seconds, and may be tried again for two minutes."""
    clock, said = FakeClock(), []

    class Away:
        def list(self):
            clock.sleep(3.0)
            raise StoreUnavailable("read timeout")

    shutdown = ShutdownRequest(LeavePage(2.0), clock)
    shutdown.request("SIGTERM asks this node to leave")
    final = FinalCheckpoint(
        memory=SimpleNamespace(slots=slots, newest=keep(slots, 7)),
        store=Away(),
        run_id="r",
        uploader_socket="/nonexistent",
        shutdown=shutdown,
        clock=clock,
        report=said.append,
        log=None,
    )
    asked_s = clock.monotonic()
    final.ensure_committed(others=True)
    assert final.newest_checkpoint(step=7, generation=1) is None
    assert clock.monotonic() - asked_s <= 2.0 + 3 * 3.0  # the calls themselves are not cut off
    assert len(said) == 2 and "cannot be listed" in said[0] and "checkpoint step=7 is not saved" in said[1]


@pytest.mark.parametrize(("capacity_bytes", "limit_s"), [(None, 30.0), (1_000_000, 32.0), (10**10, 20_030.0)])
def test_the_saves_at_the_end_of_an_agent_have_the_time_that_their_size_takes(capacity_bytes, limit_s):
    """The storage never answers. A save may wait for another one of the same size."""
    clock, said = FakeClock(), []

    class Hangs:
        ended_s = None

        def ends(self, within_s):
            clock.sleep(within_s)

        def stop(self, timeout_s):
            self.ended_s = clock.monotonic() + timeout_s

    final = FinalCheckpoint(
        memory=SimpleNamespace(slots=capacity_bytes and SimpleNamespace(capacity_bytes=capacity_bytes)),
        store=FakeStore(),
        run_id="r",
        uploader_socket="",
        shutdown=ShutdownRequest(LeavePage(LIMIT_S), clock),
        clock=clock,
        report=said.append,
        log=None,
    )
    uploader, began_s = Hangs(), clock.monotonic()
    final.finish_saves(uploader)
    assert uploader.ended_s - began_s == pytest.approx(limit_s, abs=0.2)
    (line,) = said
    assert f"waits for its save in progress, {limit_s:.0f} s at most" in line


def test_without_an_agent_the_saves_at_the_end_have_the_same_time(config, slots, monkeypatch):
    """At a byte a second; the uploader has taken a state, and does not end."""
    monkeypatch.setattr(commit_record, "LEAST_BYTES_PER_S", 1.0)
    waits, said, owner = [], [], UploaderProcess(config, None)

    def ends(within_s):
        waits.append(within_s)

    monkeypatch.setattr(owner, "ends", ends)
    monkeypatch.setattr(owner, "_process", SimpleNamespace(kill=lambda: None, wait=lambda: None))
    uploads = UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        uploader.go_on.set()
        size_bytes = hand_over(uploads, slots, 1).size_bytes
        assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED
    owner.finish(said.append)
    assert sum(waits) == 30.0 + 2 * size_bytes
    assert f"{sum(waits):.0f} s at most" in said[0]


def test_a_fence_that_was_removed_commits_nothing_until_it_is_there_again(
    config, tmp_path, slots, monkeypatch
):
    """Generation 2 began and a person emptied the folder. A missing number is not the number 0."""
    fence = tmp_path / "fence"
    monkeypatch.setattr(save, "ENTERING_S", 0.0)
    monkeypatch.setattr(save, "FENCE_PATIENCE_S", 0.0)
    uploads = UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        uploader.go_on.set()
        fence.unlink()
        hand_over(uploads, slots, 1, generation=1)
        result = uploads.wait(1, LIMIT_S)
        assert result.state is SaveState.FAILED
        assert "expected file:" in result.reason
        assert committed_steps(config) == []
        monkeypatch.setattr(save, "FENCE_PATIENCE_S", LIMIT_S)
        hand_over(uploads, slots, 1, generation=1)
        replace_whole(fence, b"2\n", fsync=False)
        assert uploads.wait(1, LIMIT_S).state is SaveState.FENCED
        replace_whole(fence, b"1\n", fsync=False)
        hand_over(uploads, slots, 1, generation=1)
        assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED


def test_a_save_whose_fence_is_removed_while_it_writes_fails_long_before_its_deadline(
    config, tmp_path, slots, monkeypatch
):
    """Whoever waits for it writes the number before the next try: `FinalCheckpoint`."""
    monkeypatch.setattr(save, "FENCE_PATIENCE_S", 0.0)
    uploads = UploaderClient(config.socket_path)
    with InThread(replace(config, save_deadline_s=1000 * LIMIT_S)) as uploader:
        hand_over(uploads, slots, 1)
        assert uploader.reached.wait(LIMIT_S)
        (tmp_path / "fence").unlink()
        uploader.go_on.set()
        result = uploads.wait(1, LIMIT_S)
        assert result is not None and result.state is SaveState.FAILED
        assert "it was removed" in result.reason
        assert committed_steps(config) == []
        replace_whole(tmp_path / "fence", b"1\n", fsync=False)
        hand_over(uploads, slots, 1)
        assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED


def test_the_owner_leaves_while_a_save_is_held(config, slots):
    """The end of the pipe comes first, the save's end after it: the loop must wait for the save."""
    uploads = UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        hand_over(uploads, slots, 1)
        assert uploader.reached.wait(LIMIT_S)
        uploader.leave()
        hand_over(uploads, slots, 2)
        uploader.go_on.set()
        assert uploads.wait(2, LIMIT_S).state is SaveState.COMMITTED
    assert uploader.is_done
    assert committed_steps(config) == [2, 1]


def test_a_save_that_fails_is_answered_and_logged(config, tmp_path, slots):
    """The run directory is a file: no checkpoint can be made, and the uploader goes on serving."""
    (tmp_path / "run").write_text("not a folder")
    uploads = UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        uploader.go_on.set()
        hand_over(uploads, slots, 1)
        assert uploads.wait(1, LIMIT_S).state is SaveState.FAILED
        (tmp_path / "run").unlink()
        hand_over(uploads, slots, 2)
        assert uploads.wait(2, LIMIT_S).state is SaveState.COMMITTED
    assert [e["event"] for e in run_records.events(tmp_path / "events")] == [
        "checkpoint_failed",
        "checkpoint_committed",
    ]


def test_a_slot_is_lent_from_the_offer_to_the_answer(config, wait_until):
    """Three slots: one in flight, one waiting, one newest.

    Nothing may be written until the first is answered.
    """
    slots, uploads = SnapshotSlots.create(4096, 3), UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        first = hand_over(uploads, slots, 1)
        assert uploader.reached.wait(LIMIT_S)
        second = hand_over(uploads, slots, 2)
        wait_until(lambda: slots._word(second.slot, _LEASES))
        keep(slots, 3)
        assert slots.begin() is None
        uploader.go_on.set()
        assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED
        assert slots.begin() == first.slot
        assert uploads.wait(2, LIMIT_S).state is SaveState.COMMITTED
    assert committed_steps(config) == [2, 1]


def test_a_save_that_another_one_replaces_gives_its_slot_back(config):
    """The second waits, and the third takes its place."""
    slots, uploads = SnapshotSlots.create(4096, 4), UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        hand_over(uploads, slots, 1)
        assert uploader.reached.wait(LIMIT_S)
        second = hand_over(uploads, slots, 2)
        hand_over(uploads, slots, 3)
        assert uploads.wait(2, LIMIT_S).state is SaveState.DROPPED
        keep(slots, 4)
        assert slots.begin() == second.slot
        uploader.go_on.set()
        assert uploads.wait(3, LIMIT_S).state is SaveState.COMMITTED


def test_a_snapshot_whose_bytes_changed_in_memory_does_not_become_a_checkpoint(config, slots):
    """Its writer published its checksum; then one bit of its last tensor is flipped."""
    uploads = UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        uploader.go_on.set()
        for step, is_flipped in ((1, False), (2, True)):
            data = image_of(step)
            said = replace(info(step), checksum=checksum.of_image(memoryview(data)))
            slot = slots.begin()
            slots.body(slot)[: len(data)] = data
            kept = slots.publish(slot, size_bytes=len(data), info=said)
            slots.body(slot)[len(data) - 1] ^= is_flipped
            uploads.offer(slots, kept, resumed_from=None, final=True)
            result = uploads.wait(step, LIMIT_S)
            assert result.state is (SaveState.FAILED if is_flipped else SaveState.COMMITTED)
    assert "changed in memory" in result.reason
    assert committed_steps(config) == [1]


def test_a_snapshot_that_is_written_over_while_it_is_saved_is_not_committed(config):
    """Between payload and record its lease is lost, as when the owner takes this uploader for dead,
    and the slot is written.
    """
    slots, uploads = SnapshotSlots.create(4096, 1), UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        hand_over(uploads, slots, 1)
        assert uploader.reached.wait(LIMIT_S)
        assert slots.begin() is None
        slots.release_all()
        keep(slots, 2)
        uploader.go_on.set()
        result = uploads.wait(1, LIMIT_S)
        assert (result.state, result.digest) == (SaveState.FAILED, "")
        assert "written over" in result.reason
    assert open_store(config.checkpoints_url).list() == []


@pytest.mark.parametrize("change", [{"slot": 7}, {"seq": 2}, {"seq": 6}, {"offset": 4096}, {"size_bytes": 5}])
def test_an_offer_of_a_snapshot_that_is_gone_fails_and_gives_no_lease_back(config, change):
    """The one slot is being saved.

    An offer of bytes that the slot held before, or never, waits behind it. It must not give back a
    lease that it never had.
    """
    slots, uploads = SnapshotSlots.create(4096, 1), UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        keep(slots, 1)
        snapshot = hand_over(uploads, slots, 2)
        assert uploader.reached.wait(LIMIT_S)
        for step in (3, 4):
            changed = replace(snapshot, info=info(step), **change)
            uploads.offer(slots, changed, resumed_from=None, final=False)
        assert uploads.wait(3, LIMIT_S).state is SaveState.DROPPED
        assert slots.begin() is None
        uploader.go_on.set()
        assert uploads.wait(2, LIMIT_S).state is SaveState.COMMITTED
        assert uploads.wait(4, LIMIT_S).state is SaveState.FAILED
    assert committed_steps(config) == [2]


def test_a_node_that_entered_a_generation_is_fenced_by_later_ones_only(config, tmp_path, slots, monkeypatch):
    """A save of generation 1 is held while generation 2 begins with this node in it; then, of 1 and
    2, while 3 begins without it.
    """
    monkeypatch.setattr(save, "ENTERING_S", 0.0)
    uploads, owner = UploaderClient(config.socket_path), UploaderProcess(config, None)
    with InThread(config) as uploader:
        hand_over(uploads, slots, 1, generation=1)
        assert uploader.reached.wait(LIMIT_S)
        (tmp_path / "fence").write_text("2\n")
        assert owner.enter(2)
        uploader.go_on.set()
        assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED
        (tmp_path / "fence").write_text("3\n")
        for generation in (1, 2):
            hand_over(uploads, slots, 2, generation=generation)
            assert uploads.wait(2, LIMIT_S).state is SaveState.FENCED
    assert committed_steps(config) == [1]


def test_a_save_waits_for_its_node_to_enter_a_generation_that_has_just_been_formed(
    config, tmp_path, slots, monkeypatch
):
    """The fence is raised, and the save goes on before the node has said that it is in the new
    generation.
    """
    monkeypatch.setattr(save, "ENTERING_S", LIMIT_S)
    uploads, owner = UploaderClient(config.socket_path), UploaderProcess(config, None)
    with InThread(config) as uploader:
        hand_over(uploads, slots, 1, generation=1)
        assert uploader.reached.wait(LIMIT_S)
        (tmp_path / "fence").write_text("2\n")
        uploader.go_on.set()
        assert owner.enter(2)
        assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED


def test_a_fence_that_does_not_answer_holds_up_its_own_save_only(config, slots, monkeypatch, wait_until):
    """The fence blocks until the test lets it go.

    Meanwhile the node enters generation 2, and of two later offers the older one is dropped.
    """
    asked, go_on = threading.Event(), threading.Event()

    def blocking_fence():
        asked.set()
        assert go_on.wait(LIMIT_S)
        return 2

    monkeypatch.setattr(save, "open_fence", lambda text, must_be_fresh=False: blocking_fence)
    uploads, owner = UploaderClient(config.socket_path), UploaderProcess(config, None)
    with InThread(config) as uploader:
        uploader.go_on.set()
        try:
            hand_over(uploads, slots, 1, generation=1)
            assert asked.wait(LIMIT_S)
            wait_until(lambda: owner.enter(2))
            for step in (2, 3):
                hand_over(uploads, slots, step, generation=2)
            assert uploads.wait(2, LIMIT_S).state is SaveState.DROPPED
        finally:
            go_on.set()
        assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED
        assert uploads.wait(3, LIMIT_S).state is SaveState.COMMITTED
    assert committed_steps(config) == [3, 1]


def test_a_restarted_uploader_knows_the_generation_that_its_node_entered(
    config, tmp_path, process, slots, wait_until
):
    """Killed after it got the number, and before: its successor saves the state of an older one."""
    (tmp_path / "fence").write_text("3\n")
    assert process.enter(2)
    for knows_first in (True, False):
        if knows_first:
            assert process.enter(3)
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not process.is_alive())
        assert knows_first or not process.enter(3)
        assert process.revive().reason == "killed by SIGKILL"
        wait_until(lambda: process.revive() or process.is_alive())  # the second time after a pause
        process.wait_ready()
        uploads = UploaderClient(config.socket_path)
        hand_over(uploads, slots, 1, generation=1)
        assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED


def test_an_uploader_that_missed_the_generation_gets_it_later(config, tmp_path, process, slots, wait_until):
    """It was just restarted, and is stopped before it listens; the owner's next poll repeats it."""
    (tmp_path / "fence").write_text("2\n")
    os.kill(process.pid, signal.SIGKILL)
    wait_until(process.revive)
    os.kill(process.pid, signal.SIGSTOP)
    assert not process.enter(2)
    os.kill(process.pid, signal.SIGCONT)
    process.wait_ready()
    assert not process.revive()
    uploads = UploaderClient(config.socket_path)
    hand_over(uploads, slots, 1, generation=1)
    assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED


class DyingProcess:
    """What `subprocess.Popen` makes of an uploader that ends at its start."""

    pid, stdin, stdout = 1, None, None

    def poll(self):
        return 2


@pytest.mark.parametrize("error", [None, BlockingIOError(errno.EAGAIN, "no process left")])
def test_an_uploader_that_keeps_dying_is_started_again_ever_more_rarely_and_for_ever(
    config, monkeypatch, error
):
    """It ends at its start, or cannot be started; the fifth death is said loudly. A process that
    has lived for a while is said once, and begins a new count.
    """
    clock, started = FakeClock(), []

    def spawn(_config):
        started.append(clock.now)
        if error is not None:
            raise error
        return DyingProcess()

    monkeypatch.setattr(client, "_spawn", spawn)
    process, said = UploaderProcess(config, DyingProcess(), clock), []
    for _ in range(600):
        said += filter(None, [process.revive()])
        clock.now += 0.5
    pauses = [after - before for before, after in itertools.pairwise(started)]
    expected = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0] + [30.0] * (len(pauses) - 6)
    assert all(0 <= found - pause <= 0.5 for found, pause in zip(pauses, expected, strict=True))
    assert process.pid is None
    assert [each.deaths >= 5 for each in said] == ["NOTHING IS SAVED" in str(each) for each in said]

    monkeypatch.setattr(client, "_spawn", lambda _config: DyingProcess())
    clock.now += 60.0
    process.revive()
    with monkeypatch.context() as patch:
        patch.setattr(DyingProcess, "poll", lambda _self: None)
        assert process.revive() is None
    clock.now += 60.0
    assert process.revive().deaths == 1


class HeldSaver:
    """A storage call that does not return until the test lets it."""

    def __init__(self):
        self.go_on = threading.Event()
        self.state = SaveState.COMMITTED

    def save(self, offer, slots):
        assert self.go_on.wait(LIMIT_S)
        return SaveResult(step=offer.step, state=self.state, reason="at last", is_ours=True)

    def prune(self, offer):
        pass


class Listener:
    def __init__(self):
        self.answers = []

    def send(self, message, *, timeout_s):
        self.answers.append(message["state"])


def held_job(slots, listener, step=1):
    keep(slots, step)
    newest = slots.newest()
    where = {"slot": newest.slot, "seq": newest.seq, "offset": newest.offset, "size_bytes": newest.size_bytes}
    return Job.accept(Offer(**meta_of(step) | where), os.dup(slots.fd), listener)


@pytest.mark.parametrize("state", [SaveState.COMMITTED, SaveState.DIFFERS])
def test_a_hanging_save_is_reported_once_as_failed_and_later_as_committed(config, tmp_path, slots, state):
    """The fake clock passes the deadline and the patience while the storage call is held; later the
    call returns after all. That its step has another state ends the run, so it is said as well.
    """
    held, clock, listener = HeldSaver(), FakeClock(), Listener()
    held.state = state
    log = EventLog(tmp_path / "events" / "u.jsonl", node="n0", clock=clock)
    jobs = Jobs(held, config, log, clock)
    jobs.add(held_job(slots, listener))
    jobs.check_overdue()
    assert listener.answers == []
    clock.now += LIMIT_S + OVERTIME_S + 1.0
    jobs.check_overdue()
    jobs.check_overdue()
    assert listener.answers == ["failed"]
    assert not jobs.is_idle
    held.go_on.set()
    jobs.wakeup.settimeout(LIMIT_S)
    jobs.advance()
    assert listener.answers == ["failed", str(state)]
    jobs.advance()
    assert jobs.is_idle


def test_a_large_save_has_more_time_than_a_small_one(config, tmp_path, slots):
    """An hour at a megabyte a second is no failure, and longer is one."""
    held, clock, listener = HeldSaver(), FakeClock(), Listener()
    jobs = Jobs(held, config, EventLog(tmp_path / "events" / "u.jsonl", node="n0", clock=clock), clock)
    job = held_job(slots, listener)
    jobs.add(replace(job, offer=replace(job.offer, size_bytes=3_600_000_000)))
    clock.now += 3600.0
    jobs.check_overdue()
    assert listener.answers == []
    clock.now += LIMIT_S + OVERTIME_S + 1.0
    jobs.check_overdue()
    assert listener.answers == ["failed"]
    held.go_on.set()


def test_a_commit_is_answered_before_old_checkpoints_are_deleted(config, tmp_path, slots):
    """Deleting hangs, and the deadline passes meanwhile: the save was committed and must not be
    reported as failed.
    """
    held, clock, listener = HeldSaver(), FakeClock(), Listener()
    held.go_on.set()
    may_prune = threading.Event()
    held.prune = lambda offer: may_prune.wait(LIMIT_S)
    jobs = Jobs(held, config, EventLog(tmp_path / "events" / "u.jsonl", node="n0", clock=clock), clock)
    jobs.add(held_job(slots, listener))
    jobs.wakeup.settimeout(LIMIT_S)
    jobs.advance()
    clock.now += LIMIT_S + OVERTIME_S + 1.0
    jobs.check_overdue()
    assert listener.answers == ["committed"]
    assert not jobs.is_idle
    may_prune.set()
    jobs.advance()
    assert jobs.is_idle


def test_saves_that_wait_for_a_deletion_that_hangs_are_reported_as_failed(config, tmp_path, slots):
    """Training would wait for their answers and save nothing more, and nobody would be told."""
    held, clock, first, second = HeldSaver(), FakeClock(), Listener(), Listener()
    held.go_on.set()
    may_prune = threading.Event()
    held.prune = lambda offer: may_prune.wait(LIMIT_S)
    jobs = Jobs(held, config, EventLog(tmp_path / "events" / "u.jsonl", node="n0", clock=clock), clock)
    jobs.add(held_job(slots, first))
    jobs.wakeup.settimeout(LIMIT_S)
    jobs.advance()
    for step in (2, 3):
        jobs.add(held_job(slots, second, step))
        jobs.check_overdue()
        assert second.answers == ["failed"] * (step - 2)
        clock.now += LIMIT_S + OVERTIME_S + 1.0
        jobs.check_overdue()
        assert second.answers == ["failed"] * (step - 1)
    assert first.answers == ["committed"]
    failed = [e for e in run_records.events(tmp_path / "events") if e["event"] == "checkpoint_failed"]
    assert [e["step"] for e in failed] == [2, 3]
    assert "whose older checkpoints are deleted" in failed[0]["reason"]
    may_prune.set()
    jobs.advance()
    assert jobs.is_idle


def test_an_offer_that_was_not_read_yet_when_the_owner_left_is_saved(config, tmp_path, slots):
    """The offer lies in a connection that is not even accepted, and the owner's pipe is at its end,
    before the loop looks for the first time.
    """
    held, clock = HeldSaver(), SystemClock()
    held.go_on.set()
    jobs = Jobs(held, config, EventLog(tmp_path / "events" / "u.jsonl", node="n0", clock=clock), clock)
    owner_fd, owner_end = os.pipe()
    os.close(owner_end)
    uploads = UploaderClient(config.socket_path)
    with _listen(config.socket_path) as socket:
        hand_over(uploads, slots, 1)
        assert Uploader(jobs, socket, owner_fd, clock).run()
    os.close(owner_fd)
    assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED


def test_an_uploader_whose_storage_hangs_exits_after_its_owner_and_reports_the_loss(config, tmp_path, slots):
    """The owner is gone and the storage call never returns: the loop gives up instead of lasting.

    All limits are zero.
    """
    held, clock, listener = HeldSaver(), FakeClock(), Listener()
    log = EventLog(tmp_path / "events" / "u.jsonl", node="n0", clock=clock)
    jobs = Jobs(held, config, log, clock)
    jobs.add(held_job(slots, listener, 1))
    jobs.add(held_job(slots, listener, 2))
    owner_fd, owner_end = os.pipe()
    os.close(owner_end)
    with _listen(config.socket_path) as socket:
        uploader = Uploader(jobs, socket, owner_fd, clock)
        # From here on each look at the clock is past every limit that was set at the look before.
        clock.monotonic = iter(range(2000, 10**9, 1000)).__next__
        assert not uploader.run()
    os.close(owner_fd)
    assert listener.answers == ["failed", "failed"]
    assert sorted(e["step"] for e in run_records.events(tmp_path / "events")) == [1, 2]
    held.go_on.set()


def test_a_client_that_ends_before_it_reads_its_answer_is_no_problem(config, capfd):
    """A worker that is killed resets its connection, which must not stand before the verdict of
    its agent. Two messages of another client later the uploader has seen it.
    """
    owner = UploaderProcess(config, None)
    with InThread(config), socket.socket(socket.AF_UNIX) as killed:
        killed.connect(config.socket_path)
        killed.send(b'{"entered": 1}\n')
        select.select([killed], [], [], LIMIT_S)
        killed.close()
        assert owner.enter(1)
        assert owner.enter(2)
    assert "cut off" not in capfd.readouterr().err


def test_a_malformed_offer_cuts_off_its_client_only(config, slots):
    """One client sends an offer that says nothing, the next one a file without slots; another
    one's save is committed as if nothing had happened.
    """
    bad, good = UploaderClient(config.socket_path), UploaderClient(config.socket_path)
    with InThread(config) as uploader:
        uploader.go_on.set()
        fd = os.memfd_create("image")
        for malformed in ({"step": 1}, meta_of(1)):
            connection = bad._connected(time.monotonic() + LIMIT_S, is_patient=True)
            connection.send(malformed, [fd], timeout_s=LIMIT_S)
            bad._unanswered.append(1)
            assert bad.wait(1, LIMIT_S).state is SaveState.LOST
        os.close(fd)
        hand_over(good, slots, 2)
        assert good.wait(2, LIMIT_S).state is SaveState.COMMITTED


def test_a_wait_for_a_step_that_was_not_offered_ends_at_once(config):
    """There is no uploader either."""
    assert UploaderClient(config.socket_path).wait(1, LIMIT_S) is None


def waiting_job(number, *, is_final):
    offer = Offer(**meta_of(number) | {"is_final": is_final})
    return Job(offer=offer, slots=None, is_leased=False, client=None)


@given(st.lists(st.booleans(), max_size=20))
def test_the_queue_keeps_the_newest_and_every_final_save(finals):
    """Offers in any order while nothing is taken out: at most one ordinary save waits, and every
    one is waiting or was dropped.
    """
    waiting, gone = (), []
    for number, is_final in enumerate(finals):
        new = waiting_job(number, is_final=is_final)
        is_full = sum(each.offer.is_final for each in waiting) >= MOST_WAITING
        waiting, dropped = enqueue(waiting, new)
        gone += dropped
        assert is_full or new in waiting
        assert all(not each.offer.is_final or is_full for each in dropped)
    assert sum(not each.offer.is_final for each in waiting) <= 1
    assert sorted(each.offer.step for each in (*waiting, *gone)) == list(range(len(finals)))


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": "7"},
        {"size_bytes": 0},
        {"seq": 0},
        {"slot": -1},
        {"offset": None},
        {"resumed_from": "x"},
        {"torch": None},
    ],
)
def test_an_offer_with_an_impossible_value_is_refused(change):
    """Each value would make a commit record that cannot be parsed."""
    with pytest.raises(ValueError, match="expected"):
        parse_request(meta_of(1) | change)


def test_a_save_that_is_lost_with_its_uploader_has_a_result_and_can_be_offered_again(
    config, slots, wait_until
):
    """The first uploader dies in the save, and its owner has started another one."""
    config = replace(config, faults="checkpoint 1 before-commit: kill uploader")
    process = UploaderProcess.start(config)
    process.wait_ready()
    uploads = UploaderClient(config.socket_path)
    hand_over(uploads, slots, 1, final=True)
    wait_until(lambda: not process.is_alive())
    assert process.revive()
    process.wait_ready()
    slots.release_all()
    uploads.offer(slots, slots.newest(), resumed_from=None, final=True)
    assert uploads.wait(1, LIMIT_S).state is SaveState.LOST
    assert uploads.wait(1, LIMIT_S).state is SaveState.COMMITTED
    assert process.stop(LIMIT_S)


def test_an_offer_that_no_uploader_read_is_a_lost_save(config, slots, wait_until):
    """The uploader is stopped, and killed with the offer in its socket."""
    process = UploaderProcess.start(config)
    process.wait_ready()
    os.kill(process.pid, signal.SIGSTOP)
    uploads = UploaderClient(config.socket_path)
    hand_over(uploads, slots, 1)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not process.is_alive())
    assert uploads.wait(1, LIMIT_S).state is SaveState.LOST
    assert not process.stop(LIMIT_S)
