"""A script that python starts draws alike in every process before elastic.start; no other does."""

import subprocess
import sys

import pytest

SCRIPT = "import elastic, random\nprint(random.random())\nimport numpy\nprint(numpy.random.rand())\n"
FILES = {"recipe.py": SCRIPT, "elastic-train": SCRIPT, "module.py": SCRIPT, "program.py": "import module\n"}


@pytest.mark.parametrize("words", [["recipe.py"], ["elastic-train"], ["program.py"], ["-c", SCRIPT]])
def test_an_importing_script_alone_draws_alike_at_each_start(tmp_path, words):
    """NumPy is imported after the seeding. The command itself is no recipe: its nodes' random
    delays must differ. Nor is a program whose module imports this library, or `python -c`.
    """
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, *words]
    drawn = {subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout for _ in range(2)}
    assert (len(drawn) == 1) == (words == ["recipe.py"])
