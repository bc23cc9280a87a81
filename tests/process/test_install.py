"""`pip install .` installs the whole package, which trains without the checkout."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest
from hatchling.build import build_wheel

ROOT = Path(__file__).parents[2]


def files_below(folder):
    found = {path for path in (folder / "elastic").rglob("*") if path.is_file()}
    return {path.relative_to(folder) for path in found if path.suffix != ".pyc"}


def test_an_installed_command_is_whole_and_trains(drill, recipes, tmp_path, monkeypatch):
    """The wheel is built by what pip calls for it, offline. A new environment has it and the other
    packages of the environment of the tests: they come by a path file, and Python ignores path
    files of folders that come by one, so that the checkout cannot be imported there. The command is
    the script that pip wrote.
    """
    monkeypatch.chdir(ROOT)
    wheel = tmp_path / build_wheel(str(tmp_path))
    environment = tmp_path / "environment"
    venv.create(environment)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    words = [*pip, "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (ours,) = environment.glob("lib/python*/site-packages")
    assert files_below(ours) == files_below(ROOT)

    (ours / "packages.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    recipe = drill.folder / "recipe.py"
    text = (recipes / "tiny.py").read_text()
    recipe.write_text(f"{text}\n    print('comes from', elastic.__file__)\n")
    command = [str(environment / "bin" / "elastic-train"), str(recipe), "--run-dir", drill.run.url]
    agent = drill.execute(command, {"PYTHONPATH": ""})
    agent.ends_with(0)
    assert drill.events("run_finished")
    assert f"comes from {environment}" in agent.output
