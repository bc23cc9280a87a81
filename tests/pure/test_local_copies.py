"""The local copies of a run at a URL are not taken for those of another run at that URL."""

import pytest

from elastic.agent.run_directory import has_recorded_end
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.events import RunFinished
from elastic.observe.log import EventLog
from elastic.observe.run_uid import claim_local_copies
from elastic.testing.fakes import FakeClock


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return RunDir.parse("memory://bucket/run")


def test_a_run_begun_anew_elsewhere_takes_nothing_of_the_older(run):
    """The bucket was emptied. This machine has the end of the older run."""
    claim_local_copies(run, "run-1", FakeClock())
    log = EventLog(run.events / "a-agent.jsonl", node="a", clock=FakeClock())
    log.record(RunFinished(steps=9, epochs=1, digest="0" * 64))
    claim_local_copies(run, "run-1", FakeClock())
    assert has_recorded_end(run)
    with pytest.raises(UsageError, match=r"found: run-1; .*move it away"):
        claim_local_copies(run, "run-2", FakeClock())


def test_a_folder_that_cannot_be_claimed_is_said(run, monkeypatch):
    run.local.mkdir(parents=True)
    (run.local / "uid").mkdir()
    with pytest.raises(UsageError, match="expected to keep the local copies of memory://bucket/run"):
        claim_local_copies(run, "run-1", FakeClock())


def test_a_run_in_a_folder_has_no_copies(tmp_path):
    run = RunDir.parse(str(tmp_path / "run"))
    claim_local_copies(run, "run-1", FakeClock())
    assert not run.local.exists()
