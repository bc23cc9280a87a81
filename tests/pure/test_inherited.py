"""What a recipe changed before elastic.start is compared with what its process began with."""

import os
import sys
from pathlib import Path

import pytest

from elastic.worker import inherited
from elastic.worker.preload import Preloaded


@pytest.fixture
def forked(tmp_path, monkeypatch):
    """A process that has inherited a module `numbers` from elsewhere. pytest changes a variable
    between this fixture and the test, which does not count.
    """
    files = {"numbers": "/installed/numbers.py"}
    monkeypatch.setattr(inherited, "_begun", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(inherited.environment, "variables", lambda: {**os.environ, "PYTEST_CURRENT_TEST": ""})
    inherited.begin(Preloaded(folder=tmp_path, files=files, uninstalled=()))
    return tmp_path


def test_a_process_that_changed_nothing_says_nothing(forked):
    sys.path.insert(0, str(forked))
    (forked / "own.py").touch()
    assert inherited.change() == ""


@pytest.mark.parametrize("value", ["1", None])
def test_a_variable_that_is_set_or_removed_is_named(forked, monkeypatch, value):
    if value is None:
        monkeypatch.delenv("PATH")
    else:
        monkeypatch.setenv("HF_HOME", value)
    assert inherited.change().startswith(f"{'PATH' if value is None else 'HF_HOME'} changed")


def test_a_folder_that_hides_an_inherited_module_is_named(forked):
    (forked / "numbers.py").touch()
    sys.path.insert(0, str(forked))
    assert "numbers.py has the name of an installed module" in inherited.change()


def test_a_spawned_process_has_inherited_nothing(monkeypatch):
    monkeypatch.setattr(inherited, "_begun", [])
    monkeypatch.setenv("HF_HOME", "1")
    assert inherited.change() == ""


def test_a_preflight_leaves_the_reason_for_its_agent(forked, monkeypatch):
    monkeypatch.setenv("HF_HOME", "1")
    answer = Path(forked / "run.json")
    monkeypatch.setenv("ELASTIC_PREFLIGHT", str(answer))
    inherited.tell(inherited.environment.read())
    assert "HF_HOME" in answer.with_suffix(inherited.environment.SPAWN).read_text()
