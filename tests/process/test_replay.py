"""A step that is done again gives the bits of the first time, or the run ends with the sentence."""

import shutil

import pytest

from elastic.observe.metrics import read

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STEPS, SAVED = 18, 7
KILL = ("--faults", "step 13 rank 0 backward: kill")


@pytest.fixture
def hidden(drill, recipes):
    """Starts a copy of the recipe that counts its steps in a place of this kind."""
    for name in ("hidden.py", "tiny.py"):
        shutil.copy(recipes / name, drill.folder)

    def start(kind, *options, **settings):
        env = {f"HIDDEN_{name.upper()}": value for name, value in settings.items()}
        options = ("--snapshot-every", "off", "--save-every", "7steps", *options)
        return drill.start(*options, recipe=drill.folder / "hidden.py", arguments=(kind,), env=env)

    return start


def kill_before(drill, agent, step, ranks=1):
    """The whole node, once all ranks stand before this step."""
    drill.stands(step, ranks)
    if step > SAVED:
        drill.happens("checkpoint_committed", step=SAVED)
    agent.process.kill()
    agent.wait()
    drill.all_are_gone()  # a worker that outlives its agent for a moment must not do the step
    drill.open(step)


def replays(drill):
    _, report = drill.inspects("report", drill.run.url)
    return [(each["step"], each["restored"], each["excuse"]) for each in report["replays"]]


def digest_of(drill):
    return drill.inspects("report", drill.run.url)[1]["final_digest"]


@pytest.mark.parametrize(("kind", "workers"), [("attribute", 1), ("environment", 3)])
def test_a_hidden_memory_ends_the_run_at_the_first_step_that_reads_it(drill, hidden, kind, workers):
    """Killed in step 13, the run goes on from step 7, and the recipe has forgotten its count. No
    restart but that of the kill is used, and nothing of the other result is written down.
    """
    agent = hidden(kind, *KILL, "--nproc-per-node", str(workers), "--max-restarts", "1")
    agent.ends_with(1)

    assert "step 8 was done again from the state of step 7 and gave another result" in agent.output
    assert "keeps something outside its State" in agent.output
    assert agent.output.count("step 8 was done again from") == 1
    assert drill.values("generation_started", "cause", "restarts") == [("start", 0), ("failure", 1)]
    assert replays(drill) == [(8, 7, "")]
    assert drill.last_step == 7
    assert max((step for (step,) in drill.values("checkpoint_committed", "step")), default=0) <= SAVED


def test_the_same_command_goes_on_with_what_the_recipe_computes_now(drill, hidden):
    """The first command ends in step 13, and its last agreed state is saved. The second begins from
    that, with lines of both results. They count no more; what it loses itself does.
    """
    plan = "step 14 rank 0 backward: kill; step 17 rank 0 backward: kill"
    options = "--snapshot-every", "5steps", "--faults", plan
    hidden("environment", *options).ends_with(1)
    assert replays(drill) == [(13, 12, "")]
    hidden("environment", *options).ends_with(1)
    ((restored,),) = drill.values("restored", "step", generation=3)
    assert restored == 12
    assert len(replays(drill)) == 2
    agent = hidden("environment", *options)
    agent.ends_with(0)

    assert "gave another result when it was done again, so that this need not be" in agent.output
    assert [line.step for line in read(drill.run.metrics)] == list(range(1, STEPS + 1))


def test_an_exact_recipe_is_never_suspected(drill, drills, hidden, tmp_path):
    """Two workers, and rank 0 is killed; then the whole node; then another number of workers goes
    on from a checkpoint. Each time steps are done again.
    """
    drill.shut(14)
    kill_before(drill, hidden("values", *KILL, "--nproc-per-node", "2"), 14, ranks=2)
    hidden("values", *KILL, "--nproc-per-node", "3").ends_with(0)

    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (7, 5), (7, 6)]
    assert replays(drill) == []
    calm = drills(tmp_path / "calm")
    calm.start("--save-every", "7steps", recipe=drill.folder / "hidden.py", arguments=("values",)).ends_with(
        0
    )
    assert digest_of(calm) == digest_of(drill)


def test_a_setting_that_is_another_one_after_a_kill_ends_the_run(drill, hidden):
    """All is lost before the first checkpoint, so that the run begins again, with another number
    that the recipe reads from outside.
    """
    drill.shut(6)
    agent = hidden("values", "--save-every", "1000steps")
    kill_before(drill, agent, 6)
    agent = hidden("values", setting="1.5")
    agent.ends_with(1)

    assert "step 1 was done again from the state of step 0 and gave another result" in agent.output
    assert replays(drill) == [(1, 0, "")]


def test_an_edited_recipe_goes_on_and_the_step_that_differs_is_said(drill, hidden):
    """The user is told of the edit, and means it."""
    drill.shut(13)
    kill_before(drill, hidden("values"), 13)
    recipe = drill.folder / "hidden.py"
    recipe.write_text(recipe.read_text().replace("0.05 *", "0.04 *"))
    agent = hidden("values")
    agent.ends_with(0)

    assert "was trained by another text of the recipe" in agent.output
    assert "The run goes on, since the recipe was edited in between" in agent.output
    assert "gave another result when it was done again, so that this need not be" in agent.output
    assert replays(drill) == [(9, 7, "the recipe was edited in between")]
    assert drill.values("recipe_edited", "step") == [(7,)]
