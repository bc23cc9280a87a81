"""The local copies of a run at a URL are not taken for those of another run at that URL."""

import pytest

from elastic.agent.finished_run import has_recorded_end
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.events import RunFinished
from elastic.observe.local_copies import claim_local_copies
from elastic.observe.log import EventLog
from elastic.testing.fakes import FakeClock


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return RunDir.parse("memory://bucket/run")


def finish(run):
    """A node that had rank 0 writes down that its run is complete."""
    log = EventLog(run.events / "a-agent.jsonl", node="a", clock=FakeClock())
    log.record(RunFinished(steps=9, epochs=1, digest="0" * 64))


@pytest.mark.parametrize("is_new", [False, True])
def test_a_run_that_another_node_began_anew_takes_nothing_of_the_older_one(run, is_new):
    """--fresh was given on another node, or this one is the first in an emptied bucket. This
    machine has the end of the older run.
    """
    claim_local_copies(run, "run-1", is_new=True)
    finish(run)
    claim_local_copies(run, "run-2", is_new=is_new)
    assert not has_recorded_end(run)
    aside = RunDir(url=run.url, local=run.local.with_name(f"{run.local.name}.old-1"))
    assert has_recorded_end(aside)


def test_the_copies_of_a_run_stay_where_it_resumes(run):
    claim_local_copies(run, "run-1", is_new=True)
    finish(run)
    claim_local_copies(run, "run-1", is_new=False)
    assert has_recorded_end(run)


@pytest.mark.parametrize("is_new", [False, True])
def test_copies_that_an_earlier_version_made_are_those_of_a_run_that_resumes(run, is_new):
    """They say nothing of their run. Where one begins they are an older run's."""
    finish(run)
    claim_local_copies(run, "run-1", is_new=is_new)
    assert has_recorded_end(run) is not is_new


def test_a_folder_that_cannot_be_claimed_is_said(run, monkeypatch):
    run.local.mkdir(parents=True)
    (run.local / "uid").mkdir()
    with pytest.raises(UsageError, match="expected to keep the local copies of memory://bucket/run"):
        claim_local_copies(run, "run-1", is_new=True)


def test_a_run_in_a_folder_has_no_copies(tmp_path):
    run = RunDir.parse(str(tmp_path / "run"))
    claim_local_copies(run, "run-1", is_new=True)
    assert not run.local.exists()
