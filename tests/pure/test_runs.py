"""All runs below a folder are listed, whatever is wrong with one of them, and nothing else is."""

import itertools
import json
import os
import shutil
from pathlib import Path

import fsspec
import pytest
from drawn_runs import write, write_whole
from logged import started
from records import IDENTITY

from elastic.observe.step_line import StepLine
from elastic.report import runs
from elastic.system.clock import SystemClock

CLOCK = SystemClock()


@pytest.fixture
def listed(printed):
    """What the command prints of a folder, its runs by name."""

    def call(*words):
        return {each["name"]: each for each in json.loads(printed(0, "runs", *words, "--json"))["runs"]}

    return call


def test_runs_at_every_depth_are_listed(tmp_path, listed, monkeypatch, printed):
    """Also one that was set aside; not a run within a run, nor what has only something of one. In a
    pipe no name is cut.
    """
    names = ["a", "c.aside-20261126-101112", "deep/er/b", "e" * 90]
    for name in (*names, "a/inner"):
        write_whole(tmp_path / "runs" / name, 3)
    for name in ("wandb/logs", "party/events"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs/wandb/run.json").write_text("{}")
    write_whole(tmp_path / "runs/.hidden/d", 3)
    monkeypatch.chdir(tmp_path)
    assert list(listed()) == names
    assert list(listed(tmp_path / "runs/a")) == ["."]
    assert names[-1] in printed(0, "runs")


def test_a_line_says_where_the_run_stands(tmp_path, listed):
    for file in write_whole(tmp_path / "done", 1200).rglob("*.jsonl"):
        os.utime(file, (1000.0, 1000.0))
    begun = started(CLOCK.wall(), 1, "start", ["n1"])
    line = StepLine(step=7, loss=0.25, generation=1, time=CLOCK.wall(), seconds=0.1)
    write(tmp_path / "young", [begun], [line])
    done, young = listed(tmp_path).values()
    assert (done["state"], done["step"], done["steps"]) == ("finished", 1200, 1200)
    assert (young["state"], young["step"], young["steps"], young["loss"]) == ("running", 7, None, 0.25)
    assert 0 <= young["age_s"] < 300 < done["age_s"]


def test_whatever_is_wrong_is_a_word_in_its_own_line(tmp_path, listed, monkeypatch, printed):
    """A script without the library is no damage. The tests run as root, who may read everything."""
    data = IDENTITY.to_json()
    other = data.replace(b'"seed": 1', b'"seed": 1, "precision": "bf16"')
    texts = {"cut": data[:40], "other": other, "unread": data, "gone": data, "lost": None, "plain": None}
    for name, text in texts.items():
        identity = write_whole(tmp_path / name, 3) / "run.json"
        identity.unlink() if text is None else identity.write_bytes(text)
    (tmp_path / "lost/checkpoints").mkdir()
    (tmp_path / "locked").mkdir()
    view_now, scan = runs.view_now, os.scandir

    def viewed(run, *, newest):
        if "unread" in run.local.parts:
            raise PermissionError(13, "Permission denied", str(run.local))
        if "gone" in run.local.parts:
            shutil.rmtree(run.local)
        return view_now(run, newest=newest)

    def scandir(path="."):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(runs, "view_now", viewed)
    monkeypatch.setattr(os, "scandir", scandir)
    by_name = listed(tmp_path)
    states = dict.fromkeys(("lost", "cut", "other"), "damaged") | {"plain": "finished"}
    states |= dict.fromkeys(("unread", "locked"), "not read")
    assert {name: each["state"] for name, each in by_name.items() if name != "gone"} == states
    assert "run.json" in by_name["cut"]["reason"]
    assert "damaged" in printed(0, "runs", tmp_path)


def test_no_link_is_followed(tmp_path, listed):
    """A run on another disk, a link to what lies above, and one that leads nowhere; in a run, a
    large file elsewhere. `metrics.jsonl` has two names, and counts once.
    """
    run = write_whole(tmp_path / "disk/a", 1000)
    (tmp_path / "large").write_bytes(os.urandom(2**20))
    (run / "link").symlink_to(tmp_path / "large")
    (tmp_path / "runs").mkdir()
    for name, target in (("a", "disk/a"), ("up", "."), ("gone", "gone")):
        (tmp_path / "runs" / name).symlink_to(tmp_path / target)
    (tmp_path / "top").symlink_to(tmp_path / "disk")
    assert listed(tmp_path / "runs") == {}
    found = listed(tmp_path / "top")
    size = sum(each.stat().st_size for each in run.rglob("*.jsonl"))
    assert list(found) == ["a"] and size / 2 < found["a"]["size_bytes"] < size


def test_a_folder_that_is_not_there_is_refused(printed):
    for where, says in (("no/such", " folder with runs in it"), ("s3://", ""), ("unknown://bucket", "")):
        assert f"expected a{says}" in printed(2, "runs", where)


def test_runs_in_an_object_store_are_listed(listed):
    """In this process's memory. One of them is deeper."""
    line = b'{"step": 2, "generation": 1, "loss": 3.5}\n'
    files = {"run.json": IDENTITY.to_json(), "uid": b"x", "events/n1/000000000000.jsonl": b""}
    files["metrics/000001/000000000001-000000000002-n1.jsonl"] = line
    for (file, data), name in itertools.product(files.items(), ("a", "deep/b")):
        fsspec.filesystem("memory").pipe_file(f"/listed/{name}/{file}", data)
    by_name = listed("memory://listed")
    assert list(by_name) == ["a", "deep/b"]
    assert {(each["step"], each["loss"]) for each in by_name.values()} == {(2, 3.5)}
    assert by_name["a"]["size_bytes"] == len(b"".join(files.values()))
