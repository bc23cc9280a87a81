"""`pip install .` installs the whole package, which trains without the checkout."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.py"


@pytest.fixture(scope="module")
def wheel(once):
    """Built as `pip install .` builds it, but with the hatchling that is installed: offline."""
    words = ("wheel", "--no-deps", "--no-build-isolation", str(ROOT), "--wheel-dir")
    (found,) = once("wheel", lambda drill: pip(*words, str(drill.folder))).glob("*.whl")
    return found


@pytest.fixture
def environment(tmp_path, wheel):
    """A new environment with the wheel, and the other packages of the environment of the tests.

    They come by a path file, and Python ignores path files of folders that come by one: the path
    file that makes the checkout importable for the tests has no effect here.
    """
    folder = tmp_path / "environment"
    venv.create(folder)
    pip("--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel))
    (ours,) = folder.glob("lib/python*/site-packages")
    (ours / "packages.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return folder


def test_a_wheel_holds_every_file_of_the_package(wheel):
    package = ROOT / "elastic"
    files = [
        *package.rglob("*.py"),
        *(package / "report/static").rglob("*.*"),
        *package.rglob("LICENSE"),
    ]
    expected = {str(path.relative_to(ROOT)) for path in files}

    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if name.startswith("elastic/")}

    assert found == expected | {"elastic/py.typed"}


def test_an_installed_command_trains_outside_the_checkout(drill, environment):
    """A copy of the recipe, cut to one epoch; the command is the script that pip wrote."""
    text = QUICKSTART.read_text()
    assert "epochs=10" in text
    recipe = drill.folder / "quickstart.py"
    recipe.write_text(text.replace("epochs=10", "epochs=1") + "run.print('comes from', elastic.__file__)\n")
    command = str(environment / "bin" / "elastic-train")

    agent = drill.execute([command, str(recipe), "--run-dir", drill.run.url], {"PYTHONPATH": ""})
    agent.ends_with(0)

    assert drill.events("run_finished")
    assert f"comes from {environment}" in agent.output


def pip(*words):
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
