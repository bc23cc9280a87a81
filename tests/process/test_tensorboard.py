"""`--tensorboard` against TensorBoard's own reader."""

import sys
from collections import defaultdict
from pathlib import Path

import pytest
import run_records
from watched import shown

from elastic.cli import main

pytestmark = pytest.mark.process
STEPS = 24  # of the recipe


def board(folder: Path) -> dict:
    """What TensorBoard shows of the folder's one run."""
    runs = [*folder.iterdir()] if folder.exists() else []
    assert len(runs) <= 1
    return shown(runs[0]) if runs else defaultdict(list)


def has_each_step_of(drill, folder: Path) -> None:
    lines = run_records.lines(drill.run.metrics)
    found = board(folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert found["loss"] == [(line["step"], pytest.approx(line["loss"])) for line in lines]
    assert found["lr"] == [(line["step"], pytest.approx(line["lr"])) for line in lines]
    assert found["elastic/step_seconds"] == [(line["step"], pytest.approx(line["seconds"])) for line in lines]
    assert [step for step, _ in found["elastic/world_size"]] == list(range(1, STEPS + 1))


def test_steps_done_again_are_in_tensorboard_once(drill, tmp_path):
    """Snapshots are off, so that the kill at step 11 costs the steps since the checkpoint of 8."""
    folder = tmp_path / "board"
    drill.shut(5, 9, 11)
    agent = drill.start("--tensorboard", str(folder), "--snapshot-every", "off")
    drill.happens("checkpoint_committed", step=4)  # else the next save may be skipped
    drill.open(5)
    drill.stands(9, ranks=1)
    drill.happens("checkpoint_committed", step=8)
    drill.open(9)
    drill.stands(11, ranks=1)
    drill.waits_for(lambda: [s for s, _ in board(folder)["loss"]] == [*range(1, 11)], "the steps before")
    drill.kill_worker(0, generation=1)
    drill.open(11)

    agent.ends_with(0)

    (restored,) = drill.events("restored", generation=2)
    assert restored["lost_steps"] > 0
    has_each_step_of(drill, folder)


@pytest.mark.parametrize("where", ["s3://bucket/board", "README.md"])
def test_what_is_no_folder_for_tensorboard_is_refused(where, recipes, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text("a file")

    assert main([str(recipes / "tiny.py"), "--tensorboard", where]) == 2

    assert "expected a folder, found --tensorboard" in capsys.readouterr().err


def test_a_tensorboardx_that_cannot_be_imported_is_refused(drill, recipes, tmp_path):
    """An empty folder of that name stands before the installed package."""
    package = tmp_path / "broken" / "tensorboardX"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    words = [str(recipes / "tiny.py"), "--run-dir", drill.run.url, "--tensorboard", str(tmp_path / "board")]
    env = {"PYTHONPATH": str(package.parent)}
    agent = drill.execute([sys.executable, "-m", "elastic.cli", *words], env)

    agent.ends_with(2)

    assert "pip install --force-reinstall 'elastic-train[tensorboard]'" in agent.output
    assert "Traceback" not in agent.output
    assert not (tmp_path / "board").exists()
    assert not drill.run.local.exists()
