"""A node that leaves sees the newest state in its memory committed, within its grace."""

from functools import partial
from types import SimpleNamespace

import pytest
from committed import commit_image
from payloads import payload_of

from elastic.agent import final_checkpoint
from elastic.agent.final_checkpoint import ensure_committed, finish_saves, newest_checkpoint
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.errors import StoreFailed
from elastic.events import CheckpointDiffers
from elastic.snapshot import checksum
from elastic.snapshot.slots import Snapshot, SnapshotInfo
from elastic.storage.store import StoreUnavailable
from elastic.system.leave_deadline import LeavePage
from elastic.testing.fakes import FakeClock, FakeStore
from elastic.uploader.client import UploaderProcess
from elastic.uploader.protocol import SaveResult, SaveState

GRACE_S = 60.0


def image_of(state):
    return payload_of(f"state {state}".encode() * 9)


def snapshot(step, generation=1, state="a"):
    said = checksum.of_image(memoryview(image_of(state)))
    info = SnapshotInfo(step=step, generation=generation, checksum=said)
    return Snapshot(slot=0, seq=2, size_bytes=9, info=info)


class Node:
    """A node that leaves, with an uploader that answers what it is told to."""

    def __init__(self, monkeypatch, newest, *answers):
        self.clock, self.store, self.said, self.offers = FakeClock(), FakeStore(), [], []
        self.answers, self.events, self.difference, self.unlisted = list(answers), [], "", set()
        self.shutdown = ShutdownRequest(LeavePage(GRACE_S), self.clock)
        monkeypatch.setattr(final_checkpoint, "offer", self.offer)
        monkeypatch.setattr(final_checkpoint, "open_store", lambda _url: self.store)
        self.uploader = SimpleNamespace(socket_path="")
        self.memory = SimpleNamespace(slots=object(), newest=newest)
        self.settings = SimpleNamespace(run=SimpleNamespace(checkpoints_url=""), run_id="r")
        self.log = SimpleNamespace(record=self.events.append)
        self.console = SimpleNamespace(print_line=self.said.append)
        self.revive_uploader = lambda: None

    def offer(self, _path, _slots, newest, *, resumed_from, final):
        assert final
        assert resumed_from is None
        self.offers.append(self.clock.now)
        if isinstance(answer := self.answers.pop(0), Exception):
            raise answer
        self.answer = SaveResult(step=newest.info.step, state=answer, reason=f"it {answer}")
        return self

    def wait(self, timeout_s):
        self.clock.now += timeout_s
        return self.answer

    def close(self):
        pass


@pytest.fixture
def leaving(monkeypatch):
    return partial(Node, monkeypatch)


@pytest.mark.parametrize("state", ["a", "b"])
def test_another_nodes_checkpoint_is_compared_with_the_own_state(leaving, state):
    node = leaving(snapshot(7))
    commit_image(node.store, "r", 7, bytearray(image_of(state)))
    ensure_committed(node, others=False)
    assert node.offers == node.said == []
    if state == "a":
        assert node.shutdown.saved_step == 7
        assert node.difference == ""
    else:
        assert node.shutdown.saved_step == 0
        assert "step 7 was already committed by generation 1 with another state" in node.difference
        assert isinstance(node.events[-1], CheckpointDiffers)


def test_a_difference_that_only_its_uploader_sees_is_one(leaving):
    """The listing is older than the commit."""
    node = leaving(snapshot(7), SaveState.DIFFERS)
    ensure_committed(node, others=False)
    assert node.difference == "it differs"
    assert node.shutdown.saved_step == 0


@pytest.mark.parametrize("passed_over", [7, 9])
def test_it_relies_on_no_checkpoint_that_its_run_passed_over(leaving, passed_over):
    """Generation 2 fell back behind it, because it is damaged, and is at step 7 now."""
    node = leaving(snapshot(7, generation=2), SaveState.COMMITTED)
    record = commit_image(node.store, "r", passed_over, bytearray(image_of("a")))
    assert newest_checkpoint(node, step=7, generation=2, is_new=True) is None
    assert newest_checkpoint(node, step=0, generation=2) == record
    ensure_committed(node, others=False)
    assert len(node.offers) == 1
    assert node.shutdown.saved_step == 7
    commit_image(node.store, "r", 8, bytearray(image_of("c")), generation=2)
    assert newest_checkpoint(node, step=8, generation=2, is_new=True).step == 8


def test_a_save_that_fails_is_tried_again(leaving):
    """The uploader is being started, then the disk is full for a moment."""
    node = leaving(snapshot(7), StoreFailed("no uploader"), SaveState.FAILED, SaveState.COMMITTED)
    ensure_committed(node, others=False)
    assert node.shutdown.saved_step == 7
    assert len(node.offers) == 3 and node.said == []


@pytest.mark.parametrize("others", [True, False])
def test_others_have_half_of_the_time_and_a_fenced_save_is_lost(leaving, others):
    """Those that fence it have the rest as well; without others it is lost at once."""
    node = leaving(snapshot(7), SaveState.FENCED)
    node.shutdown.request("SIGTERM asks this node to leave")
    began_s = node.clock.now
    ensure_committed(node, others=others)
    (offered_s,) = node.offers
    assert (offered_s - began_s > 5.0, node.clock.now - began_s > 10.0) == (others, others)
    assert node.said == ["checkpoint step=7 is not saved: it fenced"]


def test_a_store_that_is_away_holds_up_no_node_beyond_its_grace(leaving, monkeypatch):
    """Each listing fails after three seconds, and may be tried again for two minutes."""
    node = leaving(snapshot(7), *[SaveState.FAILED] * 99)

    def away():
        node.clock.sleep(3.0)
        raise StoreUnavailable("read timeout")

    monkeypatch.setattr(node.store, "list", away)
    node.shutdown.request("SIGTERM asks this node to leave")
    ensure_committed(node, others=True)
    assert newest_checkpoint(node, step=7, generation=1) is None
    assert node.clock.now <= 1000.0 + GRACE_S + 3 * 3.0  # the calls themselves are not cut off
    assert sum("cannot be listed" in line for line in node.said) == 1
    assert "checkpoint step=7 is not saved" in node.said[-1]


def test_an_uploader_is_waited_for_until_the_grace_is_over(leaving):
    node, ended = leaving(None), []

    class Saving(UploaderProcess):
        def __init__(self):
            self._clock = node.clock

        def ask_to_end(self, within_s):
            node.clock.sleep(10 * within_s)
            if node.clock.now > 1000.0 + 3600.0:
                node.shutdown.request("SIGTERM asks this node to leave")
            return False

        def stop(self, timeout_s):
            ended.append(node.clock.now + timeout_s)

    node.uploader = Saving()
    finish_saves(node)
    assert 1000.0 + 3600.0 < ended[0] < 1000.0 + 3600.0 + GRACE_S + 10.0
    assert "waiting for the save in progress; SIGTERM or Ctrl-C" in "".join(node.said)
