"""On a full disk, lines wait in memory, in order, and none is lost or written twice."""

import errno
import itertools
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.events import FirstStep
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics, read
from elastic.observe.step_line import StepLine
from elastic.system import backlog as backlog_module
from elastic.system import files, growing_file
from elastic.system.backlog import RETRY_S, Backlog
from elastic.testing.fakes import FakeClock

pytestmark = pytest.mark.usefixtures("closed_backlogs")


class Disk:
    """Files of `folder`. `is_full`: nothing can be written. `is_torn`: only half of each write."""

    def __init__(self, folder, patch):
        self.is_full = self.is_torn = False
        self._folder = str(folder)
        self._write = os.write
        patch.setattr(os, "write", self.write)

    def write(self, fd, data):
        if not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(self._folder):
            return self._write(fd, data)
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(fd, data[: len(data) // 2] if self.is_torn else data)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    return Disk(tmp_path, monkeypatch)


@pytest.fixture
def clock():
    return FakeClock()


def line(step):
    return StepLine(step=step, loss=0.5)


def steps(path):
    return [each.step for each in read(path)]


def test_lines_of_a_killed_writer_are_written_by_the_agent_in_their_order(tmp_path, disk, clock):
    """Three lines find no room, their writer is gone, and the next one rewinds to the last."""
    path, kept = tmp_path / "metrics.jsonl", Backlog.create(clock)
    first = Metrics(path, Backlog.open(kept.path))
    first.rewind(0)
    first.append(line(1))
    disk.is_full = True
    for step in (2, 3, 4):
        first.append(line(step))
    second = Metrics(path, Backlog.open(kept.path))
    rewound = second.rewind(3)
    assert (rewound.highest, rewound.last.step, [each.step for each in rewound.dropped]) == (4, 3, [4])
    second.append(line(4))
    assert not kept.write_out() and steps(path) == [1]
    disk.is_full = False
    second.append(line(5))
    assert steps(path) == [1], "nothing is written past what waits"
    assert not kept.write_out(), "soon after a try that failed there is none"
    clock.sleep(RETRY_S)
    assert kept.write_out()
    second.append(line(6))
    assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_an_older_writer_on_a_full_disk_cannot_write_into_the_record(tmp_path, disk, clock):
    """The rewind waits in memory; meanwhile the older rank 0, of another node, appends its line."""
    path, kept = tmp_path / "metrics.jsonl", Backlog.create(clock)
    older, current = Metrics(path), Metrics(path, kept)
    for step in (1, 2, 3):
        older.append(line(step))
    disk.is_full = True
    assert current.rewind(2).highest == 3
    current.append(line(3))
    disk.is_full = False
    older.append(line(4))
    clock.sleep(RETRY_S)
    assert kept.write_out()
    older.append(line(5))
    assert steps(path) == [1, 2, 3]


def test_a_line_that_was_cut_in_the_middle_is_completed(tmp_path, disk, clock):
    """The disk fills up within one write, as a tmpfs does at the end of a page."""
    path, kept = tmp_path / "events.jsonl", Backlog.create(clock)
    log = EventLog(path, node="n", clock=clock, backlog=kept)
    disk.is_torn = True
    log.record(FirstStep(step=1))
    disk.is_torn = False
    log.record(FirstStep(step=2))
    lines = path.read_text().splitlines()
    assert [f'"step": {step}' in text for step, text in enumerate(lines, 1)] == [True, True]


def test_what_finds_no_room_in_memory_either_is_said_and_nothing_ends(
    tmp_path, disk, clock, capsys, monkeypatch
):
    """Two events fit."""
    monkeypatch.setattr(backlog_module, "LIMIT_BYTES", 400)
    log = EventLog(tmp_path / "e.jsonl", node="n", clock=clock, backlog=Backlog.create(clock))
    disk.is_full = True
    for step in range(4):
        log.record(FirstStep(step=step))
    assert 0 < capsys.readouterr().err.count("event not written") < 4


def test_what_another_node_writes_now_is_dropped_here(tmp_path, disk, clock):
    """Rank 0 is on another node; lines that came late would lie between its own."""
    path, kept = tmp_path / "metrics.jsonl", Backlog.create(clock)
    disk.is_full = True
    Metrics(path, kept).append(line(1))
    assert kept.waits_for(path)
    disk.is_full = False
    assert kept.write_out(without=[path]) and steps(path) == []


OPERATIONS = st.lists(
    st.sampled_from(["step", "kill", "full", "room", "agent"]) | st.integers(0, 3), max_size=40
)


@pytest.mark.parametrize("is_shared", [True, False])
@given(OPERATIONS)
def test_the_record_is_the_one_of_a_disk_with_room(is_shared, operations):
    """A number: rank 0 dies, and the next one rewinds by so many steps; the twin has a list.

    is_shared: each generation has a file of its own.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        disk, clock, path = Disk(folder, patch), FakeClock(), Path(folder, "metrics.jsonl")
        kept, twin, generations = Backlog.create(clock), [], itertools.count(1)
        started = lambda: Metrics(  # noqa: E731
            path, Backlog.open(kept.path), generation=next(generations) if is_shared else None
        )
        writer = started()
        writer.rewind(0)
        for each in [*operations, "room", "agent"]:
            match each:
                case "step":
                    writer.append(line(len(twin) + 1))
                    twin.append(len(twin) + 1)
                case "full" | "room":
                    disk.is_full = each == "full"
                case "agent":
                    clock.sleep(RETRY_S)
                    kept.write_out()
                    writer.sync()
                case _:
                    back = 0 if each == "kill" else each
                    writer = started()
                    goal = max(0, len(twin) - back)
                    assert writer.rewind(goal).highest == len(twin)
                    del twin[goal:]
        assert kept.is_empty and steps(path) == twin
        assert path.read_bytes().count(b"\n") == len(twin)


def test_a_line_whose_agent_is_stopped_with_the_backlog_is_kept(tmp_path, disk, clock, monkeypatch, capsys):
    """The disk is full, and the agent sleeps in the middle of writing out, longer than a worker
    waits for it. The worker's lines come when the agent has woken up, in their order.
    """
    monkeypatch.setattr(backlog_module, "LOCK_S", 0.0)
    path, kept = tmp_path / "metrics.jsonl", Backlog.create(clock)
    writer = Metrics(path, Backlog.open(kept.path))
    writer.rewind(0)
    writer.append(line(1))
    disk.is_torn = True
    with kept.held():
        writer.append(line(2))
        disk.is_full = True
        writer.append(line(3))
        disk.is_full = disk.is_torn = False
        assert steps(path) == [1]
    disk.is_full = True
    writer.append(line(4))
    assert kept.waits_for(path)
    disk.is_full = False
    clock.sleep(RETRY_S)
    assert kept.write_out() and steps(path) == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("keeps the line, and tries again") == 1


def test_of_a_stopped_agent_only_the_first_line_waits_long(tmp_path, monkeypatch):
    """LOCK_S passes on a fake clock for the first line alone, until the agent is back."""
    kept, clock = Backlog.create(), FakeClock()
    worker = Backlog(os.open(kept.path, os.O_RDWR | os.O_APPEND), is_own=False, clock=clock)
    for expected_s in (backlog_module.LOCK_S, 0.0, 0.0):
        began_s = clock.monotonic()
        with kept.held(), pytest.raises(BlockingIOError):
            worker.append(tmp_path / "lines", b"1\n")
        assert clock.monotonic() - began_s == pytest.approx(expected_s, abs=0.01)
    worker.append(tmp_path / "lines", b"2\n")
    with kept.held(), pytest.raises(BlockingIOError):
        worker.append(tmp_path / "lines", b"3\n")
    assert clock.monotonic() - began_s > backlog_module.LOCK_S - 0.01


def test_a_line_that_was_cut_and_found_no_other_room_costs_not_the_next(tmp_path, disk, clock, monkeypatch):
    """The next line begins on a line of its own."""
    path, kept = tmp_path / "metrics.jsonl", Backlog.create(clock)
    writer = Metrics(path, Backlog.open(kept.path))
    writer.rewind(0)
    writer.append(line(1))
    with monkeypatch.context() as patch:
        patch.setattr(backlog_module, "LIMIT_BYTES", 0)
        disk.is_torn = True
        writer.append(line(2))
        disk.is_torn = False
    writer.append(line(3))
    assert steps(path) == [1, 3]


def test_a_folder_that_is_missing_is_made_when_there_is_room(tmp_path, disk, clock, monkeypatch):
    """Not even the folder could be created."""
    path, kept = tmp_path / "events" / "e.jsonl", Backlog.create(clock)
    log = EventLog(path, node="n", clock=clock, backlog=kept)

    def refuse(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing_file, "make_folders", refuse)
        log.record(FirstStep(step=1))
    assert not path.parent.exists()
    assert kept.write_out() and path.read_text().count("\n") == 1
    assert files.make_folders(path.parent) is None


def test_a_process_whose_owner_has_ended_keeps_its_lines_itself(tmp_path):
    owner = Backlog.create()
    path = owner.path
    os.close(int(path.rpartition("/")[2]))
    orphan = Backlog.open(path)

    orphan.append(tmp_path / "lines", b"kept\n")
    assert orphan.write_out(at_once=True)
    assert (tmp_path / "lines").read_bytes() == b"kept\n"
