"""A script that python starts draws alike in every process before elastic.start; no other does."""

import subprocess
import sys

import pytest

SCRIPT = "import elastic, random\nprint(random.random())\nimport numpy\nprint(numpy.random.rand())\n"


def printed(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["recipe.py", "elastic-train"])
def test_an_importing_script_draws_alike_at_each_start(tmp_path, name):
    """NumPy is imported after the seeding.

    The command itself is no recipe: its nodes' random delays must differ.
    """
    script = tmp_path / name
    script.write_text(SCRIPT)
    assert (printed(str(script)) == printed(str(script))) == (name == "recipe.py")


def test_an_importing_program_keeps_its_own_generators(tmp_path):
    """A module of the program's, and `python -c`."""
    (tmp_path / "module.py").write_text(SCRIPT)
    (tmp_path / "program.py").write_text("import module\n")
    assert printed(str(tmp_path / "program.py")) != printed(str(tmp_path / "program.py"))
    assert printed("-c", SCRIPT) != printed("-c", SCRIPT)
