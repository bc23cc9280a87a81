"""A recipe's own file is told from a library's by its folders."""

import sysconfig
from pathlib import Path

import pytest
import torch

import elastic
from elastic.data.own_files import is_own_file

PACKAGE = Path(elastic.__file__).parent


@pytest.mark.parametrize(
    "path",
    [
        f"{PACKAGE}_recipes/gpt.py",
        f"{PACKAGE.parent}/recipes/gpt.py",
        f"{PACKAGE}/../recipes/gpt.py",
        "/home/user/my-packages/recipe.py",
        "/home/user/packages/recipe.py",
        f"{sysconfig.get_path('stdlib')}-experiments/recipe.py",
        "<string>",
    ],
)
def test_a_folder_whose_name_only_begins_like_that_of_a_library_is_the_recipes(path):
    """Guards would skip it, and what they look for would be silent."""
    assert is_own_file(path)


@pytest.mark.parametrize(
    "path",
    [
        f"{PACKAGE}/train/step.py",
        f"{PACKAGE}/../{PACKAGE.name}/train/step.py",
        torch.__file__,
        pytest.__file__,
        f"{sysconfig.get_path('stdlib')}/json/decoder.py",
        "/usr/lib/python3/dist-packages/six.py",
        "/home/user/.venv/lib/python3.12/site-packages/six.py",
        "<frozen runpy>",
    ],
)
def test_what_is_installed_and_pythons_library_are_no_files_of_a_recipe(path):
    assert not is_own_file(path)


def test_what_pip_installs_beside_a_recipe_is_no_file_of_it(tmp_path):
    """`pip install --target DIR` leaves a record of the files that it wrote there."""
    record = tmp_path / "bar-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text('bar/std.py,sha256=x,1\n"bar/a,b.py",,\n')
    assert not is_own_file(f"{tmp_path}/bar/std.py") and not is_own_file(f"{tmp_path}/bar/a,b.py")
    assert is_own_file(f"{tmp_path}/recipe.py") and is_own_file(f"{tmp_path}/bar/mine.py")
