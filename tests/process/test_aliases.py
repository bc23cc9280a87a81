"""Names that a recipe holds for parts of its objects act in a resumed run as in a calm one."""

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

EVERY_STEP = ("--snapshot-every", "1", "--save-every", "1steps")


def test_names_for_parts_of_objects_belong_to_them_after_a_kill(drill, drills, recipes, tmp_path):
    """A group, an optimizer's state, a list, a tensor and the model's own weights, held by names
    from before the loop. The worker is killed in steps 3 and 6.
    """
    recipe, plan = recipes / "aliased.py", "step 3 rank 0 backward: kill; step 6 rank 0 backward: kill"
    drill.start(*EVERY_STEP, "--faults", plan, recipe=recipe, arguments=("names",)).ends_with(0)
    calm = drills(tmp_path / "calm")
    calm.start(recipe=recipe, arguments=("names",)).ends_with(0)

    assert len(drill.events("fault_injected")) == 2
    assert drill.events("run_finished")[0]["digest"] == calm.events("run_finished")[0]["digest"]


def test_a_load_that_forgets_is_refused_after_the_first_step(drill, recipes):
    """Its count would begin from the start in every generation. No step is left behind."""
    agent = drill.start("--save-every", "1000steps", recipe=recipes / "aliased.py", arguments=("forgets",))
    agent.ends_with(2)

    assert "slow.calls was 1 and is 0; its state_dict does not give it" in agent.output
    assert not drill.run.metrics.exists() or not drill.run.metrics.read_text()
