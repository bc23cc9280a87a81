"""What a fork server's workers may inherit is compared with what the script does."""

import os
import sys
import threading
from pathlib import Path

import pytest

from elastic.system.processes import thread_count
from elastic.worker import preload
from elastic.worker.fork_server import fork_obstacle
from elastic.worker.preload import Preloaded


def test_a_module_is_installed_by_its_own_place_or_its_links(tmp_path, monkeypatch):
    """A folder whose name begins like an allowed one is not inside it."""
    monkeypatch.setattr("elastic.worker.preload._INSTALLED", ("/lib/site/", f"{tmp_path}/real/"))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    places = ["/lib/site/a.py", f"{tmp_path}/link/b.py", "/home/me/b.py", "/lib/site-mine/c.py"]
    assert list(map(preload.is_installed, places)) == [True, True, False, False]


@pytest.fixture
def forked(tmp_path, monkeypatch):
    """A process that has inherited a module `numbers` from elsewhere. pytest changes a variable
    between this fixture and the test, which does not count.
    """
    monkeypatch.setattr(preload, "_begun", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(preload.environment, "variables", lambda: {**os.environ, "PYTEST_CURRENT_TEST": ""})
    preload.begin(Preloaded(files={"numbers": "/installed/numbers.py"}, uninstalled=()))
    return tmp_path


def test_no_process_with_a_thread_is_forked():
    nothing, is_over = Preloaded(files={}, uninstalled=()), threading.Event()
    before = thread_count()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    try:
        assert f"importing left {before} threads running" in fork_obstacle(nothing, Path())
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(("name", "value"), [("HF_HOME", "1"), ("PATH", None)])
def test_a_variable_that_is_set_or_removed_is_named_and_told(forked, monkeypatch, name, value):
    """By a preflight to its agent. A process that was spawned has inherited nothing."""
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    assert preload.changed().startswith(f"{name} changed")
    answer = forked / "run.json"
    monkeypatch.setenv("ELASTIC_PREFLIGHT", str(answer))
    preload.tell(preload.environment.read())
    assert name in answer.with_suffix(preload.environment.SPAWN).read_text()
    preload._begun.clear()
    assert preload.changed() == ""


def test_a_folder_that_hides_an_inherited_module_is_named(forked):
    """One with a module of the script's own changes nothing."""
    sys.path.insert(0, str(forked))
    (forked / "own.py").touch()
    assert preload.changed() == ""
    (forked / "numbers.py").touch()
    assert "numbers.py has the name of an installed module" in preload.changed()
