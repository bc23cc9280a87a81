"""A step is done again by other workers, and a difference is found, named and never passed over.

Each comparison has planted faults of its kind beside the recipe without them: one that cannot fail
would prove nothing.
"""

import signal

import pytest
import run_records
from kind import PRELUDE

# At given steps: by `auto` none comes where starting a worker takes more than five seconds.
REHEARSE = ("--rehearse", "7", "--snapshot-every", "1", "--audit", "off")
TWICE = ("--rehearse", "10", *REHEARSE[2:])
OVERLAP = ("--rehearse", "1000", "--snapshot-every", "1", "--audit", "off")
LOOP = """
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    before(step)
    step.mean_loss(loss_of)
    optimizer.step()
"""
HIDDEN = "\nseen = []\ndef before(step):\n    seen.append(1)\n    optimizer.param_groups[0]['lr'] = 0.1 / len(seen)\n"
BY_WORLD = """
import os, time
from pathlib import Path
gates = Path(os.environ["TINY_GATES"])
def before(step):
    if step.number == 6:
        (gates / f"at-6-rank{run.rank}").touch()
        while not (gates / "go-6").exists():
            time.sleep(0.01)
    optimizer.param_groups[0]["lr"] = 0.1 * run.world_size
"""


@pytest.fixture
def recipe(tmp_path):
    def write(before):
        path = tmp_path / "recipe.py"
        path.write_text(PRELUDE + before + LOOP)
        return path

    return write


def test_a_recipe_that_a_restart_changes_is_stopped(drill, recipe):
    agent = drill.start(*REHEARSE, "--nproc-per-node", "2", recipe=recipe(HIDDEN))
    agent.ends_with(1)
    assert drill.values("step_differed", "step", "verdict") == [(7, "hidden")]
    assert "outside its State" in agent.output
    assert "step 6 is the newest that is saved" in agent.output
    assert not drill.events("rehearsed")
    again = drill.start(*REHEARSE, recipe=recipe(HIDDEN))  # as a launcher does
    again.ends_with(1)
    assert "expected a script that was mended since step 7" in again.output
    assert (drill.last_step, drill.is_committed(7)) == (6, False)


def test_a_recipe_that_depends_on_the_world_size_is_stopped(drill, recipe):
    path = recipe(BY_WORLD)
    first = drill.start("--max-nodes", "2", *OVERLAP, recipe=path)
    drill.stands(6, ranks=1)
    second = drill.start("--max-nodes", "2", *OVERLAP, recipe=path)
    drill.happens("drain_requested")
    drill.open(6)
    first.ends_with(1)
    second.ends_with(1)
    assert drill.values("step_differed", "step", "verdict") == [(7, "hidden")]
    assert "the number of workers too: 1 then, 2 now" in first.output
    assert "step 6 is the newest that is saved" in first.output


def test_what_a_restart_computes_can_be_accepted(drill, recipe):
    drill.start(*REHEARSE, "--accept", recipe=recipe(HIDDEN)).ends_with(0)
    assert drill.values("step_differed", "step", "accepted") == [(7, True), (14, True)]
    not_restored = [{"len(seen)": f"{count} then, 1 now"} for count in (7, 8)]
    assert drill.values("rehearsed", "not_restored") == [(each,) for each in not_restored]


def test_a_death_or_a_leave_in_a_rehearsal_costs_no_step(drill, undisturbed):
    """A worker is killed in the step that is done again: an ordinary restart. In the next rehearsal
    its node is to leave.
    """
    drill.shut("meet-4")
    agent = drill.start_before("meet-2", *TWICE)
    drill.shut(10)
    drill.open("meet-2")
    drill.waits_for((drill.gates / "at-10-rank0").exists, "the step that is done again")
    drill.kill_worker(0, generation=2)
    drill.open(10)
    drill.stands("meet-4", ranks=1)
    assert drill.values("generation_started", "cause", generation=3) == [("failure",)]
    agent.signal(signal.SIGTERM)
    agent.ends_with(75)
    assert "step 20 is saved" in agent.output
    drill.ends_like(undisturbed, drill.start(*TWICE))


def test_hidden_memory_ends_the_run_at_the_step_that_reads_it(drill, recipe):
    """Killed in step 13, the run goes on from step 7, and the recipe has forgotten its count: the
    rate of step 8 is another one, and so is the loss of step 9. No restart but that of the kill is
    used, and nothing of the other result is written down. The same command begins from step 7, with
    lines of the first result, which count no more.
    """
    path = recipe(HIDDEN)
    options = ("--nproc-per-node", "3", "--snapshot-every", "off", "--save-every", "7steps")
    plan = ("--faults", "step 13 rank 0 backward: kill", "--max-restarts", "1")
    agent = drill.start(*options, *plan, recipe=path)
    agent.ends_with(1)

    assert "step 9 was done again from the state of step 7 and gave another result" in agent.output
    assert "keeps something outside its State" in agent.output
    assert agent.output.count("step 9 was done again from") == 1
    assert drill.values("generation_started", "cause", "restarts") == [("start", 0), ("failure", 1)]
    _, report = drill.inspects("report", drill.run.url)
    assert [(each["step"], each["restored"], each["excuse"]) for each in report["replays"]] == [(9, 7, "")]
    assert drill.last_step == 8
    assert max((step for (step,) in drill.values("checkpoint_committed", "step")), default=0) <= 7

    agent = drill.start(*options, recipe=path)
    agent.ends_with(0)
    assert drill.values("restored", "step")[-1] == (7,)
    assert "gave another result when it was done again, so that this need not be" in agent.output
    assert [line["step"] for line in run_records.lines(drill.run.metrics)] == list(range(1, 19))
