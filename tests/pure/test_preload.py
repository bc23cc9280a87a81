"""What a fork server may import is found in the text of a script, and what its workers may inherit
is compared with what the script does.
"""

import os
import sys
import threading
from pathlib import Path

import pytest

from elastic.system.processes import thread_count
from elastic.worker import preload
from elastic.worker.fork_server import fork_obstacle
from elastic.worker.preload import Preloaded, find_imports, is_inside

TEXTS = {
    "recipe.py": """
import json as js, pkg.sub
from pkg.sub import mod
try:
    import zlib
except ImportError:
    import bz2
if x:
    from csv import *
elif y:
    with z:
        import xml.dom
def f():
    import never
class C:
    import never
import recipe, no_such_module_anywhere, broken, elastic.errors
""",
    "pkg/__init__.py": "import wave",
    "pkg/sub/__init__.py": "from . import mod\nfrom .. import other",
    "pkg/sub/mod.py": "from ..deep.er import thing\nfrom ......... import above",
    "pkg/other.py": "import decimal",
    "pkg/deep/er.py": "from xml.sax import *",
    "broken.py": "import never\ndef f(:",
}


def test_imports_are_of_the_recipe_and_its_local_modules(tmp_path, monkeypatch):
    """Local packages are read with all that encloses them, in cycles and by relative imports too;
    what is missing or broken imports nothing. No line runs.
    """
    for name, text in TEXTS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = find_imports(tmp_path / "recipe.py")
    assert found[0] == ("json", "") and len(found) == len(set(found))
    assert set(found) == {
        *((name, "") for name in ("json", "zlib", "bz2", "csv", "xml.dom", "elastic.errors")),
        *((name, "") for name in ("wave", "decimal", "xml.sax")),
    }


def test_a_module_is_outside_if_in_none_of_the_folders():
    """A folder whose name begins like an allowed one is not inside it."""
    files = ["/lib/site/a.py", "/lib/site", "/lib/other/d.py", "/home/me/b.py", "/lib/site-mine/c.py"]
    assert [file for file in files if not is_inside(file, ["/lib/site", "/lib/other"])] == files[3:]


@pytest.fixture
def forked(tmp_path, monkeypatch):
    """A process that has inherited a module `numbers` from elsewhere. pytest changes a variable
    between this fixture and the test, which does not count.
    """
    monkeypatch.setattr(preload, "_begun", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(preload.environment, "variables", lambda: {**os.environ, "PYTEST_CURRENT_TEST": ""})
    preload.begin(Preloaded(folder=tmp_path, files={"numbers": "/installed/numbers.py"}, uninstalled=()))
    return tmp_path


def test_no_process_with_a_thread_is_forked():
    nothing, is_over = Preloaded(folder=Path(), files={}, uninstalled=()), threading.Event()
    before = thread_count()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    try:
        assert f"importing left {before} threads running" in fork_obstacle(nothing)
    finally:
        is_over.set()
        thread.join()


def test_a_process_that_changed_nothing_says_nothing(forked):
    sys.path.insert(0, str(forked))
    (forked / "own.py").touch()
    assert preload.change() == ""


@pytest.mark.parametrize(("name", "value"), [("HF_HOME", "1"), ("PATH", None)])
def test_a_variable_that_is_set_or_removed_is_named_and_told(forked, monkeypatch, name, value):
    """By a preflight to its agent. A process that was spawned has inherited nothing."""
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    assert preload.change().startswith(f"{name} changed")
    answer = forked / "run.json"
    monkeypatch.setenv("ELASTIC_PREFLIGHT", str(answer))
    preload.tell(preload.environment.read())
    assert name in answer.with_suffix(preload.environment.SPAWN).read_text()
    preload._begun.clear()
    assert preload.change() == ""


def test_a_folder_that_hides_an_inherited_module_is_named(forked):
    (forked / "numbers.py").touch()
    sys.path.insert(0, str(forked))
    assert "numbers.py has the name of an installed module" in preload.change()
