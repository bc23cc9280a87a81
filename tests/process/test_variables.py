"""Options in the environment are those of one command, not of the commands that a recipe starts."""

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

# A script without the library: it shows what a worker has in its environment.
SHOWS = """
import os
print("SEEN", sorted(name for name in os.environ if name.startswith("ELASTIC_") and name != "ELASTIC_AGENT"))
"""


def test_a_worker_sees_no_variable_of_its_agents_options_and_the_agent_obeys_them(drill, tmp_path):
    """Else a recipe that starts another elastic-train would have it train in its own run directory.
    Two workers come from a variable; the run directory from the option, which counts more.
    """
    recipe = tmp_path / "shows.py"
    recipe.write_text(SHOWS)
    variables = {
        "ELASTIC_NPROC_PER_NODE": "2",
        "ELASTIC_RUN_DIR": str(tmp_path / "not-here"),
        "ELASTIC_FROM": "",
        "ELASTIC_MAX_NODE": "3",
    }
    agent = drill.start(recipe=recipe, env=variables)
    agent.ends_with(0)
    assert "the environment sets --nproc-per-node by ELASTIC_NPROC_PER_NODE\n" in agent.output
    assert "did you mean ELASTIC_MAX_NODES?" in agent.output
    assert agent.output.count("SEEN ['ELASTIC_MAX_NODE']") == 2
    assert not (tmp_path / "not-here").exists()
