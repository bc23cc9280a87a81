"""What is there to be looked at, events, metrics and logs, ends no agent when it cannot be read."""

import errno
import io
import os
import re
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from elastic.agent import exit_report
from elastic.agent.exit_report import report_exit
from elastic.agent.fault_injection import NodeFaults
from elastic.agent.run_directory import has_recorded_end, set_aside
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.checkpoint import provenance as numbers
from elastic.checkpoint.provenance import newest_generation
from elastic.config.run_dir import RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.events import WorkerStarted
from elastic.faults.inject import Claims
from elastic.faults.plan import parse
from elastic.observe import upload_parts
from elastic.observe.console import ConsoleFollower
from elastic.observe.log import EventLog, read_events, read_rare
from elastic.observe.metrics import Metrics
from elastic.observe.step_line import StepLine
from elastic.rendezvous.group import RunEnd
from elastic.storage.remote import Objects
from elastic.system.clock import SystemClock
from elastic.system.leave_deadline import LeavePage
from elastic.testing.fakes import FakeClock


class Stale:
    """While `is_on`, calls on paths below a folder fail as on a file server that was restarted, or
    with another error.
    """

    def __init__(self, folder, patch, code=errno.ESTALE):
        self.is_on = False
        self._code = code
        self._folder = str(folder)
        # The mode of a folder hides what is in it, and not the folder.
        for name in ("scandir", "open") if code == errno.EACCES else ("stat", "lstat", "scandir", "open"):
            patch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, call):
        def failing(path, *arguments, **options):
            if self.is_on and str(path).startswith(self._folder):
                raise OSError(self._code, os.strerror(self._code), str(path))
            return call(path, *arguments, **options)

        return failing


@pytest.fixture
def stale(tmp_path, monkeypatch):
    return Stale(tmp_path, monkeypatch)


@pytest.fixture
def run(tmp_path):
    return RunDir.parse(str(tmp_path))


def test_a_run_whose_events_are_unreadable_is_complete(run, stale, capsys, monkeypatch):
    """Events that can be read no more end no report of a failure either."""
    run.events.mkdir()
    record = SimpleNamespace(step=4, digest="d" * 64)
    monkeypatch.setattr(exit_report, "newest_checkpoint", lambda _parts, **_: record)
    parts = SimpleNamespace(
        settings=SimpleNamespace(imports_library=True, run=run),
        group=SimpleNamespace(is_first=False),
        log=SimpleNamespace(record=lambda event: None),
        shutdown=ShutdownRequest(LeavePage(30.0), FakeClock()),
    )
    stale.is_on = True
    for code in (0, 1):
        end = RunEnd(exit_code=code, reason="why")
        left = SimpleNamespace(end=end, failure=None, last_step=4, generation=1)
        assert report_exit(left, parts) == code
    said = capsys.readouterr()
    assert "complete; its events cannot be read" in said.out
    assert "training failed: why; step 4" in said.err
    assert not has_recorded_end(run)


def test_a_claim_that_cannot_be_looked_at_injects_nothing(run, stale, capsys):
    log, clock = SimpleNamespace(record=lambda event: None), FakeClock()
    faults = NodeFaults(parse("every 1s: kill random worker, seed 1"), Claims(run.faults), log, clock)
    clock.sleep(1000.0)
    stale.is_on = True
    here = SimpleNamespace(members=("n1",), rank_of_node=0, world_size=1, number=1)
    faults.poll(here, 1, {0: 1 << 30})
    assert "fault not injected" in capsys.readouterr().out


def test_a_console_without_metrics_shows_lines_then_progress(run, stale):
    """The thread of the console is followed without a clock: `_poll` is one round. Another machine
    chose what is in the line.
    """
    out = io.StringIO()
    console = ConsoleFollower(run, "n1", out, FakeClock())
    Metrics(run.metrics, generation=1).append(StepLine(step=4, generation=1))
    stale.is_on = True
    console.print_line("\x1b[2Ja line")
    console._poll()
    stale.is_on = False
    console._poll()
    assert out.getvalue().splitlines()[0] == "\\x1b[2Ja line" and "step 4" in out.getvalue()


def test_an_event_without_file_or_reader_ends_no_agent(tmp_path, monkeypatch):
    """Its folder is a file, and standard error is a pipe that nothing reads."""
    (tmp_path / "events").write_text("")
    log = EventLog(tmp_path / "events" / "a.jsonl", node="n1", clock=SystemClock())
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=Mock(side_effect=BrokenPipeError), flush=print))
    log.record(WorkerStarted(rank=0, pid=1))


@pytest.mark.parametrize("command", ["report", "status", "diff"])
def test_a_worker_reads_what_it_can_of_events_a_command_all(run, monkeypatch, command, printed):
    """One of two files cannot be opened."""
    for name in "ab":
        log = EventLog(run.events / f"{name}.jsonl", node=name, clock=SystemClock())
        log.record(WorkerStarted(rank=0, pid=1))
    Stale(run.events / "a.jsonl", monkeypatch).is_on = True
    assert [each.node for each in read_rare(run.events, WorkerStarted)] == ["b"]
    runs = (run.url,) * (2 if command == "diff" else 1)
    said = printed(2, command, *runs, "--json")
    assert re.search(r"found: .*Stale file handle: .*a\.jsonl", said)


TOO_LONG = "x" * 300


def count_on(run):
    return newest_generation(run, FakeClock())


# Path.glob finds nothing where permission is denied, and raises the other one.
@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize(
    ("folder", "door", "says"),
    [
        ("logs", count_on, "expected to find the newest generation of"),
        ("", count_on, "expected to find the newest generation of"),
        ("", lambda run: set_aside(run, FakeClock(), print), r"expected to read .*; take another --run-dir"),
        ("events", lambda run: read_events(run.events), "events"),
    ],
)
def test_what_may_not_be_read_is_not_taken_for_nothing(run, monkeypatch, folder, door, says, code):
    """A number would be used twice, a run be set aside, and events be left out of a report."""
    run.log(generation=3, rank=0).parent.mkdir(parents=True)
    (run.logs / "1764450000000").mkdir()  # a person's
    run.events.mkdir()
    for name in ("run.json", ".metrics-000004.jsonl"):
        (run.local / name).touch()
    assert newest_generation(run, FakeClock()) == 4
    Stale(run.local / folder, monkeypatch, code).is_on = True
    with pytest.raises((UsageError, OSError), match=says):
        door(run)


def test_a_launch_whose_storage_does_not_answer_is_refused(monkeypatch):
    """All machines are new, and so is the place where they meet: only the checkpoints have the
    number.
    """
    store = SimpleNamespace(list=Mock(side_effect=StoreFailed("503")))
    monkeypatch.setattr(numbers, "open_store", lambda _url: store)
    with pytest.raises(UsageError, match="expected to find the newest generation of the run in memory://b/r"):
        newest_generation(RunDir.parse("memory://b/r"), FakeClock())


def test_a_new_node_at_a_url_counts_on_from_uploads(tmp_path, monkeypatch):
    """The newest checkpoint is of generation 1; two more trained and died before the next one."""
    monkeypatch.chdir(tmp_path)
    run = RunDir.parse("memory://bucket/numbers")
    objects = Objects(run.url)
    assert newest_generation(run, FakeClock()) == 0
    objects.write(upload_parts.metrics_part_name(2, 5, 9, "gone-1-0badc0de"), b"")
    assert newest_generation(run, FakeClock()) == 2
    objects.write("logs/000003/rank0/000000000000.log", b"")
    objects.write("metrics/notes/of-a-person.txt", b"")
    assert newest_generation(run, FakeClock()) == 3


@pytest.mark.parametrize(
    "words", [[TOO_LONG], ["report", TOO_LONG], ["status", TOO_LONG], ["diff", TOO_LONG, TOO_LONG]]
)
def test_a_name_that_no_file_can_have_is_the_commands_mistake(words, printed):
    assert TOO_LONG in printed(2, *words)
