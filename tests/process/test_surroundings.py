"""What surrounds a recipe, such as string hashing and variables, acts as under plain python."""

import sys

import pytest

from elastic.config.environment import HASH_SEED

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def digest(drill):
    (finished,) = drill.events("run_finished")
    return finished["digest"]


def test_groups_built_from_a_set_are_the_same_after_a_resume_by_another_agent(drills, tmp_path, recipes):
    """The shells of two agents set different hash seeds.

    The first one trains three steps and drains; the second one resumes with two workers. Each group
    has a rate of its own, so another order of the groups gives other weights.
    """
    calm, stormy = drills(tmp_path / "calm"), drills(tmp_path / "stormy")
    calm.start(recipe=recipes / "sets.py").ends_with(0)
    command = [sys.executable, "-m", "elastic.cli", str(recipes / "sets.py"), "--run-dir", stormy.run.url]
    stormy.execute(command, {HASH_SEED: "1", "SETS_STOPS": "3"}).ends_with(75)
    stormy.start("--nproc-per-node", "2", recipe=recipes / "sets.py").ends_with(0)
    assert digest(stormy) == digest(calm)
