"""What a power cut leaves of a run's files: the same command goes on, and the result stays.

tests/pure/test_power_cut.py has every cut; these are the kinds of them, with real agents.
"""

import os
import shutil
import signal

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def tear_a_save(run):
    """Half of the payload of step 15 is there, and the draft of its record."""
    (attempt,) = (run.local / "checkpoints" / f"{12:012d}").glob("a-*")
    later = run.local / "checkpoints" / f"{15:012d}"
    shutil.copytree(attempt, later / attempt.name)
    os.truncate(later / attempt.name / "state.safetensors", 1000)
    (later / ".COMMIT.json.0123").write_bytes(b"")


def empty_the_newest_version_and_tear_lines(run):
    """Metrics and events: steps 13 to 15 are cut, or are holes, and the newest event is half."""
    os.truncate(max(run.rendezvous.glob("state-*")), 0)
    (run.rendezvous / ".elastic-0123").write_bytes(b'{"form')
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(lines[:12]) + lines[12][:20] + b"\0" * 300)
    for path in run.events.glob("*.jsonl"):
        os.truncate(path, path.stat().st_size - 10)


def test_what_a_power_cut_leaves_resumes_exactly(drill, undisturbed):
    """It comes before step 16; steps 4, 8 and 12 are saved. Nothing is removed by hand; generations
    count on, and no log is written over.
    """
    drill.shut(5, 9, 13, 16)
    agent = drill.start("--keep", "9")
    for gate in (5, 9, 13):
        drill.stands(gate, ranks=1)
        drill.happens("checkpoint_committed", step=gate - 1)
        drill.open(gate)
    drill.stands(16, ranks=1)
    agent.signal(signal.SIGKILL)
    drill.all_are_gone()
    log = drill.run.log(generation=1, rank=0)
    before = log.read_bytes()
    tear_a_save(drill.run)
    empty_the_newest_version_and_tear_lines(drill.run)
    drill.open(16)
    agent = drill.start()
    drill.ends_like(undisturbed, agent)
    assert drill.values("restored", "step", "source", generation=2) == [(12, "checkpoint")]
    assert log.read_bytes() == before and drill.run.log(generation=2, rank=0).exists()
    assert "remove" not in agent.output and "Traceback" not in agent.output
