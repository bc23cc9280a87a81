"""Bad input ends with exit 2, a sentence (expected, found, what to do), and nothing written."""

import shutil
import sys
from unittest.mock import Mock

import fsspec
import pytest


@pytest.fixture
def refused(drill):
    """Run a command in the drill's folder and return its output."""

    def all_there():
        return [path for path in sorted(drill.folder.rglob("*")) if not path.name.startswith("printed-")]

    def run(*words, env=None):
        before = (drill.tree(), all_there())
        agent = drill.command([str(word) for word in words], env)
        agent.ends_with(2)
        assert (drill.tree(), all_there()) == before
        assert "Traceback" not in agent.output.splitlines()[-1]
        return agent.output

    return run


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--run-dir", "a-file"], "a-file/run.json, found"),
        # Root fails where the folder is made, others where their access is checked: two messages.
        (["--run-dir", "/proc/elastic/run"], "--run-dir or"),
        (["--from", "no-run@3"], "no-run, found none; --from takes RUN[@STEP][:NAME,...]"),
        (["--tensorboard", "s3://bucket/board"], "expected a folder, found --tensorboard"),
        (["--", "--global-batch", "30"], "found 4 and 30; try 4 and 32"),
        (["--", "--no-such-setting"], "ended with exit code 2 in elastic.start or before it"),
    ],
)
def test_a_command_with_one_mistake_is_refused(refused, drill, recipes, words, says):
    """None leaves a run directory behind, or changes a file that is in the place of one."""
    (drill.folder / "a-file").write_text("precious")
    assert says in refused(recipes / "tiny.py", *words)


def test_a_recipe_that_cannot_start_is_refused(refused, drill):
    recipe = drill.folder / "recipe.py"
    recipe.write_text("import elastic\nraise KeyError('at import')\n")
    assert "KeyError: 'at import'" in refused(recipe)


def test_another_runs_directory_is_refused_with_differences(refused, drill, recipes, undisturbed):
    """Other arguments, then another recipe, for a run directory that holds a run. A command that
    cannot start sets no run aside.
    """
    shutil.copytree(undisturbed.run.local, drill.run.local)
    said = refused(recipes / "tiny.py", "--run-dir", drill.run.url, "--", "--shards", "8")
    assert "recipe arguments: none there, --shards 8 here" in said
    assert "shards: 4 there, 8 here" in said
    other = drill.folder / "other.py"
    other.write_text("import elastic\nelastic.start(seed=7, global_batch=32, shards=4)\n")
    assert "recipe: tiny.py there, other.py here" in refused(other, "--run-dir", drill.run.url)
    fresh = recipes / "tiny.py", "--run-dir", drill.run.url, "--fresh"
    assert "should name an interface" in refused(*fresh, env={"GLOO_SOCKET_IFNAME": "none0"})
    requeued = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    assert "expected no --fresh in a job that Slurm has requeued" in refused(*fresh, env=requeued)


def test_a_missing_extra_names_the_command_that_installs_it(recipes, tmp_path, monkeypatch, printed):
    """The library for s3:// is not installed, and fsspec raises ImportError; nor tensorboardX."""
    missing = Mock(side_effect=ImportError("Install s3fs to access S3"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    monkeypatch.setitem(sys.modules, "elastic.report.tensorboard", None)
    said = printed(2, recipes / "tiny.py", "--run-dir", "s3://bucket/run")
    assert "pip install elastic-train[s3]" in said
    said = printed(2, recipes / "tiny.py", "--tensorboard", "board")
    assert "pip install --force-reinstall 'elastic-train[tensorboard]'" in said
    assert not list(tmp_path.iterdir())
