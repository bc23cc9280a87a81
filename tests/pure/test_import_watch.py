"""A change of settings before an inherited module's first import is noticed, and no other is."""

import os
import sys

import pytest

from elastic.worker import import_watch
from elastic.worker.import_watch import ImportWatch


class BegunAgain(BaseException):
    pass


def begin_again(reason):
    raise BegunAgain(reason)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """It holds the package `inherited` with a submodule, and `brought`, which comes with it."""
    for name in ("inherited", "vendored", "harmless"):
        (tmp_path / name).mkdir()
    (tmp_path / "inherited" / "__init__.py").write_text("import brought\n")
    (tmp_path / "inherited" / "sub.py").write_text("")
    (tmp_path / "brought.py").write_text("")
    (tmp_path / "another.py").write_text("")
    (tmp_path / "vendored" / "another.py").write_text("")
    (tmp_path / "harmless" / "unheard_of.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("SET_BEFORE", "1")
    modules = dict(sys.modules)
    __import__("inherited.sub")
    __import__("another")
    yield tmp_path
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]


def reason_of(text, folder, *, finish=False, is_recipe=True):
    """What a recipe of this text is told; None where it runs to its end."""
    brought = {"inherited": ["inherited", "brought"], "torch": ["torch"]}
    watch = ImportWatch(brought, begin_again, is_recipe=is_recipe)
    before = dict(os.environ), sys.modules.get("brought")
    watch.start()
    try:
        exec(
            compile(text, "recipe.py", "exec"),
            {"folder": str(folder), "__name__": "__main__", "__package__": ""},
        )
        if finish:
            import_watch.finish()
    except BegunAgain as reason:
        return str(reason)
    finally:
        watch._seen.update(("torch", import_watch.LAZY))
        import_watch.finish()
        os.environ.clear()
        os.environ.update(before[0])
        sys.modules["brought"] = before[1]
        sys.modules.pop("stand_in", None)
    return None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import os\nos.environ['NEW'] = '1'\nimport inherited", "set NEW"),
        ("import os\nos.environ.setdefault('NEW', '1')\nfrom inherited import sub", "set NEW"),
        ("import os\nos.environ.update(NEW='1', OTHER='2')\nimport inherited", "set NEW, OTHER"),
        ("import os\nos.putenv('NEW', '1')\nimport inherited.sub as s", "set NEW"),
        ("import os\ndel os.environ['SET_BEFORE']\nimport inherited", "set SET_BEFORE"),
        ("import os\ndef f():\n    os.environb[b'NEW'] = b'1'\nf()\nimport inherited", "set NEW"),
        ("import os, importlib\nos.environ['NEW'] = '1'\nimportlib.import_module('inherited')", "set NEW"),
        ("import os, another\nos.environ['NEW'] = '1'\nimport inherited", "set NEW"),
        ("import os, inherited\nos.environ['NEW'] = '1'\nimport inherited.sub", "set NEW"),
        (
            "import sys\nsys.path.insert(0, folder + '/vendored')\nimport inherited",
            "has a another of its own",
        ),
        ("import site\nsite.addsitedir(folder + '/vendored')\nimport inherited", "has a another of its own"),
        ("import sys\nsys.path.reverse()\nimport inherited", "changed their order"),
        ("import sys\nsys.meta_path.insert(0, sys.meta_path[-1])\nimport inherited", "sys.meta_path"),
        ("import sys\nsys.modules['stand_in'] = None\nimport inherited", "sys.modules['stand_in']"),
        ("import sys\nsys.modules['brought'] = sys\nimport inherited", "sys.modules['brought']"),
    ],
)
def test_a_change_before_the_first_import_of_an_inherited_module_is_noticed(folder, text, says):
    """Each text is run as a recipe, in a process that has imported the modules already."""
    reason = reason_of(text, folder)
    assert reason is not None
    assert says in reason
    assert reason.startswith(f"line {text.count(chr(10)) + 1} of recipe.py imports inherited")


@pytest.mark.parametrize(
    "text",
    [
        "import os, inherited\nos.environ['NEW'] = '1'\nimport inherited, brought",
        "import os\nos.environ['SET_BEFORE'] = '1'\nimport inherited",
        "import os\nos.environ['NEW'] = '1'\nimport json, elastic.errors",
        "import sys\nsys.path.insert(0, folder + '/harmless')\nimport inherited",
        "import sys\nsys.path.append(folder)\nimport inherited",
        "import sys\nsys.path.append(folder + '/missing')\nimport inherited",
        "import os\nos.environ['NEW'] = '1'",
        "try:\n    from . import inherited\nexcept ImportError:\n    pass",
    ],
)
def test_a_change_that_plain_python_would_not_show_either_keeps_the_fork(folder, text):
    """The module or what brought it was imported before; the value was that before; the new folder
    holds no module that is loaded; no import follows.
    """
    assert reason_of(text, folder) is None


@pytest.mark.parametrize("is_installed", [True, False])
def test_what_a_library_sets_at_its_import_is_not_the_recipes(folder, is_installed):
    """A module of the recipe's own acts as lines of the recipe do; so does a call of a library."""
    target = folder / "target"
    target.mkdir()
    (target / "sets_new.py").write_text("import os\ndef f(): os.environ['NEW'] = '1'\nf()\n")
    sys.path.append(str(target))
    if is_installed:  # as by `pip install --target`
        (target / "sets_new-1.0.dist-info").mkdir()
    assert (reason_of("import sets_new\nimport inherited", folder) is None) == is_installed
    assert reason_of("import sets_new\nsets_new.f()\nimport inherited", folder) is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import os\nos.environ['NEW'] = '1'", "imports torch after"),
        ("import os, torch\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = '1'", "imports torch._dynamo after"),
        ("import os, torch\nos.environ['NEW'] = '1'", None),
    ],
)
def test_elastic_start_counts_as_an_import_of_torch(folder, monkeypatch, text, says):
    """It imports torch where the recipe has not; torch imports its compiler later by itself."""
    for name in ("torch", import_watch.LAZY):
        monkeypatch.setitem(sys.modules, name, sys.modules["json"])
    reason = reason_of(text, folder, finish=True)
    assert reason is None if says is None else says in reason


def test_a_script_without_the_library_begins_again_only_before_it_imports_torch(folder, monkeypatch):
    """It may have trained for hours when it sets a variable and imports the next module."""
    monkeypatch.setitem(sys.modules, "torch", sys.modules["json"])
    before, after = "os.environ['NEW'] = '1'", "import torch"
    assert reason_of(f"import os\n{before}\n{after}\nimport inherited", folder, is_recipe=False) is not None
    assert reason_of(f"import os\n{after}\n{before}\nimport inherited", folder, is_recipe=False) is None


def test_a_child_of_the_worker_never_begins_again(folder, monkeypatch):
    """A data-loading process that was forked before elastic.start would run the recipe."""
    monkeypatch.setattr(import_watch.os, "getpid", iter([1, 2, 2, 2]).__next__)
    assert reason_of("import os\nos.environ['NEW'] = '1'\nimport inherited", folder) is None


def test_the_import_functions_are_pythons_own_again_afterwards(folder):
    """The training loop must not pay for the watch."""
    before = __import__, os.putenv, os.unsetenv
    reason_of("import inherited", folder)
    assert before == (__import__, os.putenv, os.unsetenv)
