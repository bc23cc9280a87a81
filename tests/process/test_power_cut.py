"""What a power cut leaves of a run's files: the same command goes on, and the result stays.

tests/pure/test_power_cut.py has every cut; these are the kinds of them, with real agents.
"""

import os
import shutil
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def empty_newest_version_and_tear_a_save(run):
    """Half of the payload of step 15 is there, and the draft of its record."""
    os.truncate(max(run.rendezvous.glob("state-*")), 0)
    (attempt,) = (run.local / "checkpoints" / f"{12:012d}").glob("a-*")
    later = run.local / "checkpoints" / f"{15:012d}"
    shutil.copytree(attempt, later / attempt.name)
    os.truncate(later / attempt.name / "state.safetensors", 1000)
    (later / ".COMMIT.json.0123").write_bytes(b"")


def lose_names_in_the_rendezvous_folder_and_tear_lines(run):
    """Metrics and events: steps 13 to 15 are cut, or are holes, and the newest event is half."""
    shutil.rmtree(run.rendezvous)
    run.rendezvous.mkdir()
    (run.rendezvous / ".elastic-0123").write_bytes(b'{"form')
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(lines[:12]) + lines[12][:20] + b"\0" * 300)
    for path in run.events.glob("*.jsonl"):
        os.truncate(path, path.stat().st_size - 10)


CUTS = [empty_newest_version_and_tear_a_save, lose_names_in_the_rendezvous_folder_and_tear_lines]


@pytest.fixture
def killed(once, drills, drill) -> Path:
    """A run whose processes were all killed before step 16; steps 4, 8 and 12 are saved."""

    def make(folder):
        doomed = drills(folder / "drill")
        doomed.shut(5, 9, 13, 16)
        agent = doomed.start("--keep", "9")
        for gate in (5, 9, 13):
            doomed.stands(gate, ranks=1)
            doomed.happens("checkpoint_committed", step=gate - 1)
            doomed.open(gate)
        doomed.stands(16, ranks=1)
        agent.signal(signal.SIGKILL)
        doomed.all_are_gone()

    shutil.copytree(once("killed-before-16", make) / "drill" / "run", drill.run.local)
    return drill


@pytest.mark.parametrize("cut", CUTS, ids=["version and save", "names and lines"])
def test_what_a_power_cut_leaves_resumes_exactly(killed, undisturbed, cut):
    """Nothing is removed by hand; generations count on, and no log is written over."""
    log = killed.run.log(generation=1, rank=0)
    before = log.read_bytes()
    cut(killed.run)
    agent = killed.start()
    killed.ends_like(undisturbed, agent)
    assert killed.values("restored", "step", "source", generation=2) == [(12, "checkpoint")]
    assert log.read_bytes() == before and killed.run.log(generation=2, rank=0).exists()
    assert "remove" not in agent.output and "Traceback" not in agent.output
