"""All runs below a folder are listed, whatever is wrong with one of them, and nothing else is."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from long_run import IDENTITY, write_long_run

from elastic.cli import main
from elastic.events import GenerationStarted
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
from elastic.observe.step_line import StepLine
from elastic.report import find_runs, runs
from elastic.report.runs import list_runs
from elastic.system.clock import SystemClock
from elastic.testing.fakes import FakeClock

CLOCK = SystemClock()


@pytest.fixture
def listed(tmp_path, capsys):
    """What the command prints of a folder, its runs by name."""

    def call(*words: str):
        assert main(["runs", *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return found, {each["name"]: each for each in found["runs"]}

    return call


def test_runs_at_every_depth_are_listed_and_other_folders_are_not(tmp_path, listed):
    """A run within a run, one that was set aside, and folders that have only something of one."""
    for name in ("a", "a/inner", "deep/er/b", "c.aside-20261126-101112"):
        write_long_run(tmp_path / name, 3)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/run.json").write_text("{}")
    (tmp_path / "wandb/logs").mkdir()
    (tmp_path / "party/events").mkdir(parents=True)
    write_long_run(tmp_path / ".hidden/d", 3)
    write_long_run(tmp_path / "a/checkpoints/no", 3)

    found, by_name = listed(str(tmp_path))

    assert list(by_name) == ["a", "a/inner", "c.aside-20261126-101112", "deep/er/b"]
    assert found["unread"] == []


def test_the_folder_may_be_a_run_itself_and_the_default_is_runs(tmp_path, listed, monkeypatch):
    write_long_run(tmp_path / "runs/a", 3)
    assert list(listed(str(tmp_path / "runs/a"))[1]) == ["."]
    monkeypatch.chdir(tmp_path)
    assert list(listed()[1]) == ["a"]


def test_a_line_says_where_the_run_stands(tmp_path, listed):
    for file in write_long_run(tmp_path / "done", 1200).rglob("*.jsonl"):
        os.utime(file, (1000.0, 1000.0))
    log = EventLog(tmp_path / "young/events/n1.jsonl", node="n1", clock=CLOCK)
    log.generation = 1
    log.record(GenerationStarted(world_size=1, nodes=["n1"], cause="start", restarts=0))
    line = StepLine(step=7, loss=0.25, generation=1, time=CLOCK.wall(), seconds=0.1)
    Metrics(tmp_path / "young/metrics.jsonl", generation=1).append(line)

    _, by_name = listed(str(tmp_path))

    done, young = by_name["done"], by_name["young"]
    assert (done["state"], done["step"], done["steps"]) == ("finished", 1200, 1200)
    assert (young["state"], young["step"], young["steps"], young["loss"]) == ("running", 7, None, 0.25)
    assert 0 <= young["age_s"] < 300 < done["age_s"]


def test_the_size_is_what_the_disk_gives_up_each_file_once_and_no_run_within(tmp_path, listed):
    """`metrics.jsonl` has two names, and a link leads to a large file elsewhere."""
    run = write_long_run(tmp_path / "runs/a", 100)
    before = listed(str(tmp_path / "runs"))[1]["a"]["size_bytes"]
    (tmp_path / "large").write_bytes(os.urandom(2**20))
    (run / "link").symlink_to(tmp_path / "large")
    write_long_run(run / "inner", 5000)
    (run / "own.bin").write_bytes(os.urandom(2**16))
    os.link(run / "own.bin", run / "second-name")

    size = listed(str(tmp_path / "runs"))[1]["a"]["size_bytes"]
    assert before + 2**16 <= size < before + 2**17


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (IDENTITY.to_json()[:40], "damaged"),
        (b"", "damaged"),
        (b"[1, 2]", "damaged"),
        (IDENTITY.to_json().replace(b'"seed": 0', b'"seed": "zero"'), "damaged"),
        (replace(IDENTITY, format=2).to_json(), "finished"),
        (IDENTITY.to_json().replace(b'"seed": 0', b'"seed": 0, "precision": "bf16"'), "other version"),
        (b'{"recipe": "a.py", "format": 9, "parts": []}', "other version"),
    ],
)
def test_a_damaged_run_and_one_of_another_version_say_so_and_the_others_are_listed(
    text, state, tmp_path, listed, capsys
):
    (write_long_run(tmp_path / "a", 3) / "run.json").write_bytes(text)
    write_long_run(tmp_path / "b", 3)

    _, by_name = listed(str(tmp_path))

    assert {name: each["state"] for name, each in by_name.items()} == {"a": state, "b": "finished"}
    assert state == "finished" or "run.json" in by_name["a"]["reason"]
    assert main(["runs", str(tmp_path)]) == 0
    assert state in capsys.readouterr().out


def test_checkpoints_without_run_json_and_events_that_cannot_be_read_are_words_too(
    tmp_path, listed, monkeypatch
):
    """The second as root, who may read everything: the file is what no process can read."""
    (write_long_run(tmp_path / "lost", 3) / "run.json").unlink()
    (tmp_path / "lost/checkpoints").mkdir()
    write_long_run(tmp_path / "unread", 3)
    original = runs.read_newest

    def read_newest(run):
        if "unread" in run.local.parts:
            raise PermissionError(13, "Permission denied", str(run.local))
        return original(run)

    monkeypatch.setattr(runs, "read_newest", read_newest)
    _, by_name = listed(str(tmp_path))
    assert {name: each["state"] for name, each in by_name.items()} == {
        "lost": "damaged",
        "unread": "not read",
    }


def test_a_script_without_the_library_is_a_run_too(tmp_path, listed):
    run = write_long_run(tmp_path / "plain", 3)
    (run / "run.json").unlink()
    assert listed(str(tmp_path))[1]["plain"]["state"] == "finished"


def test_links_neither_hide_a_run_nor_make_the_search_endless(tmp_path, listed):
    """A run on another disk, a link to what lies above, and one that leads nowhere."""
    write_long_run(tmp_path / "disk/a", 3)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/a").symlink_to(tmp_path / "disk/a")
    (tmp_path / "runs/up").symlink_to(tmp_path)
    (tmp_path / "runs/gone").symlink_to(tmp_path / "gone")
    (tmp_path / "disk/a/self").symlink_to(tmp_path / "disk/a")
    (tmp_path / "top").symlink_to(tmp_path / "runs")

    assert list(listed(str(tmp_path / "runs"))[1]) == ["a"]
    assert list(listed(str(tmp_path / "top"))[1]) == ["a"]


def test_what_was_not_looked_into_is_said(tmp_path, listed, monkeypatch, capsys):
    """A folder that cannot be read, and more folders than a search takes."""
    write_long_run(tmp_path / "a", 3)
    (tmp_path / "locked").mkdir()
    original = os.scandir

    def scandir(path="."):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found, by_name = listed(str(tmp_path))
    assert list(by_name) == ["a"]
    assert found["unread"][0]["name"] == "locked"
    monkeypatch.setattr(find_runs, "MOST_FOLDERS", 2)
    assert "more than 2 folders" in listed(str(tmp_path))[0]["unread"][0]["reason"]
    main(["runs", str(tmp_path)])
    assert "not looked into: locked" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "expected a folder with runs in it" in capsys.readouterr().err
    for url in ("s3://", "unknown://bucket"):
        assert main(["runs", url]) == 2
        assert "expected a" in capsys.readouterr().err
    assert main(["runs", "a", "b"]) == 2
    assert main(["runs", "--yes"]) == 2


@pytest.fixture
def bucket():
    """An object store in this process's memory with two runs, one of them deeper."""
    fs = fsspec.filesystem("memory")
    for name in ("team/a", "team/deep/b"):
        for file, data in {
            "run.json": IDENTITY.to_json(),
            "uid": b"x",
            "events/n1/000000000000.jsonl": b"",
            "metrics/000001/000000000001-000000000002-n1.jsonl": b'{"step": 2, "generation": 1, "loss": 3.5}\n',
        }.items():
            fs.pipe_file(f"/bucket/{name}/{file}", data)
    yield "memory://bucket"
    fs.rm("/bucket", recursive=True)


def test_runs_in_an_object_store_are_listed_by_few_requests(bucket, listed, monkeypatch):
    found, by_name = listed(f"{bucket}/team")
    assert {name: (each["step"], each["loss"]) for name, each in by_name.items()} == {
        "a": (2, 3.5),
        "deep/b": (2, 3.5),
    }
    assert by_name["a"]["size_bytes"] == len(IDENTITY.to_json()) + 1 + 42
    monkeypatch.setattr(find_runs, "MOST_LISTINGS", 2)
    found, by_name = listed(bucket)
    assert by_name == {}
    assert "more than 2 folders" in found["unread"][0]["reason"]


def test_a_store_that_is_slow_ends_the_reading_and_the_rest_is_named(bucket):
    """Each look at the clock is a minute later."""

    class Slow(FakeClock):
        def monotonic(self) -> float:
            self.sleep(60.0)
            return super().monotonic()

    found = list_runs(f"{bucket}/team", Slow())
    assert [each.state for each in found.runs] == ["interrupted", "not read"]


def test_a_run_that_vanishes_meanwhile_costs_its_own_line(tmp_path, monkeypatch):
    write_long_run(tmp_path / "a", 3)
    write_long_run(tmp_path / "b", 3)
    found = find_runs.find_runs(runs.RunDir.parse(str(tmp_path)))
    shutil.rmtree(tmp_path / "a")
    monkeypatch.setattr(runs, "find_runs", lambda _where: found)
    states = {each.name: each.state for each in list_runs(str(tmp_path), CLOCK).runs}
    assert states == {"a": "damaged", "b": "finished"}
