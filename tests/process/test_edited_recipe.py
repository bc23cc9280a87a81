"""A recipe that builds other objects than when its state was saved is told so, and what to do."""

import pytest


@pytest.fixture
def edited(drill, recipes):
    """Starts the recipe with a text of it in the place of another."""
    recipe = drill.folder / "recipe.py"

    def start(old="", new=""):
        text = (recipes / "tiny.py").read_text()
        assert old in text
        recipe.write_text(text.replace(old, new))
        return drill.start("--snapshot-every", "1", "--save-every", "1000steps", recipe=recipe)

    return start


def test_edited_settings_are_told_once_the_saved_stay(edited, drill):
    """Interrupted in step 10, with another rate afterwards; a worker is killed."""
    built, with_adam = (
        "optimizer=optimizer)",
        "optimizer=optimizer, adam=torch.optim.AdamW(model.parameters(), lr={}))",
    )
    drill.shut(10, 15)
    drill.drains(edited(built, with_adam.format("1e-2")), 10)
    agent = edited(built, with_adam.format("2e-2"))
    drill.stands(15, ranks=1)
    drill.kill_worker(0, generation=2)
    drill.open(15)
    agent.ends_with(0)

    assert agent.output.count("warning: the recipe now builds other settings") == 1
    assert "adam.param_groups[0].lr 0.01, not 0.02" in agent.output
    assert f"elastic-train RECIPE --from {drill.run.url} --run-dir NEW" in agent.output
    assert drill.values("settings_ignored", "step") == [(10,)]


def test_a_misfit_is_named_and_what_was_in_memory_is_saved(edited, drill, undisturbed):
    """The recipe is edited while it trains, and its worker dies before anything was saved. The
    same command ends in the same way; the edit is taken back, and the run goes on at the next step.
    """
    drill.shut(10)
    agent = edited()
    drill.stands(10, ranks=1)
    (drill.folder / "recipe.py").write_text((drill.folder / "recipe.py").read_text().replace("96", "97"))
    drill.kill_worker(0, generation=1)
    agent.ends_with(76)
    assert "the snapshot of step 9 does not fit what the recipe builds" in agent.output
    drill.happens("checkpoint_committed", step=9)
    agent = edited("96", "97")
    agent.ends_with(76)
    assert "does not fit what the recipe builds: model does not take it" in agent.output
    assert "size mismatch for 0.weight" in agent.output
    assert "Put the recipe back and give the same command" in agent.output
    assert f"--from {drill.run.url}:NAME --run-dir NEW" in agent.output
    assert drill.inspects("verify", drill.run.url)[0] == 0

    drill.open(10)
    drill.ends_like(undisturbed, edited())
    assert drill.values("restored", "step", "lost_steps", "source") == [(0, 0, "none"), (9, 0, "checkpoint")]
