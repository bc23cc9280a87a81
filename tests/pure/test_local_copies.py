"""The local copies of a run at a URL are not taken for those of another run at that URL."""

import threading
from concurrent.futures import ThreadPoolExecutor

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


def finish(run):
    """A node that had rank 0 writes down that its run is complete."""
    log = EventLog(run.events / "a-agent.jsonl", node="a", clock=FakeClock())
    log.record(RunFinished(steps=9, epochs=1, digest="0" * 64))


def test_a_run_begun_anew_elsewhere_takes_nothing_of_the_older(run):
    """The bucket was emptied. This machine has the end of the older run."""
    claim_local_copies(run, "run-1")
    finish(run)
    claim_local_copies(run, "run-1")
    assert has_recorded_end(run)
    claim_local_copies(run, "run-2")
    assert not has_recorded_end(run)
    aside = RunDir(url=run.url, local=run.local.with_name(f"{run.local.name}.old-1"))
    assert has_recorded_end(aside)


def test_a_folder_that_cannot_be_claimed_is_said(run, monkeypatch):
    run.local.mkdir(parents=True)
    (run.local / "uid").mkdir()
    with pytest.raises(UsageError, match="expected to keep the local copies of memory://bucket/run"):
        claim_local_copies(run, "run-1")


def test_a_run_in_a_folder_has_no_copies(tmp_path):
    run = RunDir.parse(str(tmp_path / "run"))
    claim_local_copies(run, "run-1")
    assert not run.local.exists()


def test_processes_that_claim_at_one_moment_agree(run):
    """The ranks of torchrun on one machine, or several agents, and a folder of an older run. One
    renamed what another had just claimed, or failed.
    """
    for number in range(30):
        with ThreadPoolExecutor(4) as processes:
            go = threading.Barrier(4)
            claims = [
                processes.submit(lambda: go.wait() >= 0 and claim_local_copies(run, f"run-{number}"))  # noqa: B023
                for _ in range(4)
            ]
        assert [each.result() for each in claims] == [None] * 4
        assert (run.local / "uid").read_text() == f"run-{number}"
    asides = [(each / "uid").read_text() for each in run.local.parent.glob(f"{run.local.name}.old-*")]
    assert sorted(asides) == sorted(f"run-{number}" for number in range(29))
