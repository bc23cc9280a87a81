"""--fresh renames a run directory whose place it has taken, and leaves the place free. Local copies
of a run at a URL are not taken for those of another run there.
"""

from pathlib import Path
from unittest.mock import Mock

import pytest

from elastic.agent.run_directory import has_recorded_end, set_aside
from elastic.checkpoint.provenance import claim_local_copies
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.events import RunFinished
from elastic.observe.log import EventLog
from elastic.rendezvous import meeting_place
from elastic.rendezvous.meeting_place import NOBODY, Place
from elastic.system.clock import SystemClock


@pytest.fixture
def run(tmp_path):
    run = RunDir.parse(str(tmp_path / "run"))
    run.local.mkdir()
    (run.local / "run.json").write_text("{}")
    return run


def is_free(folder):
    found = meeting_place.newest(RunDir.parse(str(folder)), SystemClock())
    return found is not None and found[1].kind == NOBODY


def test_a_renamed_run_leaves_its_group_behind(run):
    """Processes of it that wake up late are fenced; the run may go on under its new name."""
    run.rendezvous.mkdir()
    set_aside(run, SystemClock(), lambda _text: None)
    (aside,) = run.local.parent.glob("run.aside-*")
    assert run.rendezvous.exists() and not (aside / run.rendezvous.name).exists()
    assert is_free(aside)


def test_a_directory_that_cannot_be_renamed_stays_and_is_free(run, monkeypatch):
    """As where it is a mount point."""
    monkeypatch.setattr(Path, "rename", Mock(side_effect=OSError("busy")))
    with pytest.raises(UsageError, match="busy"):
        set_aside(run, SystemClock(), print)
    assert is_free(run.local)


def test_a_run_that_began_during_a_pause_is_not_renamed(run, monkeypatch):
    """It has taken the place, and is stopped before it renames."""

    def stop(_now_s):
        meeting_place.put(run, 2, Place(kind="dir"))
        return "later"

    monkeypatch.setattr("elastic.agent.run_directory.timestamp", stop)
    with pytest.raises(UsageError, match="another command took it over while this one stood still"):
        set_aside(run, SystemClock(), print)
    assert [path.name for path in run.local.parent.iterdir()] == ["run"] and not is_free(run.local)


def test_what_holds_no_run_is_not_renamed(tmp_path):
    set_aside(RunDir.parse(str(tmp_path)), SystemClock(), print)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "notes").touch()
    with pytest.raises(UsageError, match="holds files and no run"):
        set_aside(RunDir.parse(str(tmp_path)), SystemClock(), print)


def test_a_run_begun_anew_elsewhere_takes_nothing_of_the_older(tmp_path, monkeypatch):
    """The bucket was emptied. This machine has the end of the older run."""
    monkeypatch.chdir(tmp_path)
    run, clock = RunDir.parse("memory://bucket/run"), SystemClock()
    claim_local_copies(run, "run-1", clock)
    log = EventLog(run.events / "a-agent.jsonl", node="a", clock=clock)
    log.record(RunFinished(steps=9, epochs=1, digest="0" * 64))
    claim_local_copies(run, "run-1", clock)
    assert has_recorded_end(run)
    with pytest.raises(UsageError, match=r"found: run-1; .*move it away"):
        claim_local_copies(run, "run-2", clock)
