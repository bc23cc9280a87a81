"""A finished run loses files that nothing reads, and answers as before, interrupted or not."""

import io
import json
import sys
from pathlib import Path

import fsspec
import pytest
from committed import commit_in
from drawn_runs import write_whole
from records import IDENTITY
from torch import nn

from elastic.agent.run_directory import has_recorded_end
from elastic.cli import main
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.report import clean as clean_module
from elastic.system.clock import SystemClock
from elastic.train.state.state import State

ATTEMPT = "checkpoints/000000000020/a-000001-12345678/state.safetensors"
DAMAGED = "checkpoints/000000000060/a-000001-12345678/state.safetensors"
GONE = {ATTEMPT, "logs/000001/rank0.log", "logs/000002/rank0.log"}
STAYING = {
    "logs/000003/rank0.log",
    "rendezvous/state-000000000007.json",
    "stopped.json",
    "own/checkpoints/000000000020/a-000001-12345678/state.safetensors",
    "faults/x/1.1",
    DAMAGED,
}


def write(run: Path, name: str) -> None:
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"some bytes")


@pytest.fixture
def run(tmp_path) -> Path:
    """Finished, in three generations, with two committed states and what such runs leave: also
    an attempt with a damaged record.
    """
    folder = write_whole(tmp_path / "run", 120)
    for step in (60, 120):
        commit_in(folder, IDENTITY, step, State(model=nn.Linear(3, 1)))
    for name in GONE | STAYING:
        write(folder, name)
    (folder / DAMAGED).with_name("COMMIT.json").write_text("{")
    return folder


def files_of(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


def answers(run: Path, capsys) -> list:
    capsys.readouterr()
    codes = [main([command, str(run), "--json"]) for command in ("report", "status", "verify")]
    said = [json.loads("{" + part) for part in capsys.readouterr().out.split("\n{")[1:]]
    for each in said:
        each.pop("last_checkpoint", None)  # its age
    return [codes, said, has_recorded_end(RunDir.parse(str(run)))]


@pytest.mark.parametrize("removed", [0, 1, len(GONE)])
def test_what_is_not_needed_goes_and_all_else_answers(removed, run, capsys, monkeypatch):
    """Ctrl-C between two files; the same command then removes the rest."""
    before, files, remove = answers(run, capsys), files_of(run), clean_module._remove
    left = iter(range(removed))

    def interrupted(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        remove(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(clean_module, "_remove", interrupted)
        assert main(["clean", str(run), "--yes"]) == (0 if removed == len(GONE) else 130)
    assert len(files - files_of(run)) == removed
    assert answers(run, capsys) == before
    assert main(["clean", str(run), "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == len(GONE) - removed
    assert files_of(run) == files - GONE
    assert answers(run, capsys) == before


@pytest.mark.parametrize("answer", ["n\n", "", "of course\n", "y\n"])
def test_without_a_yes_nothing_is_removed(answer, run, capsys, monkeypatch):
    """Without a terminal to ask on, the command is refused."""
    files, terminal = files_of(run), io.StringIO(answer)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["clean", str(run)]) == 2
    assert main(["clean", str(run), "--json"]) == 0
    terminal.isatty = lambda: True
    assert files_of(run) == files
    assert main(["clean", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"10 bytes  {ATTEMPT}  (an attempt that was not committed)" in out
    assert f"remove these {len(GONE)} files, {10 * len(GONE)} bytes in all?" in out
    assert files_of(run) == files - (GONE if answer == "y\n" else set())


def test_a_run_that_is_not_finished_is_refused(run, tmp_path, capsys):
    (log,) = (run / "events").iterdir()
    log.write_text("".join(line for line in log.open() if "run_finished" not in line))
    files = files_of(run)
    (tmp_path / "empty").mkdir()
    for folder in (run, tmp_path / "empty"):
        assert main(["clean", str(folder), "--yes"]) == 2
    assert "expected a finished run, found that" in capsys.readouterr().err
    assert files_of(run) == files


def test_a_run_that_began_under_the_name_meanwhile_stays_whole(run):
    """While a person thinks, --fresh renames the folder, and another run begins."""
    aside, files = run.with_name("aside"), files_of(run)

    def agrees(_files):
        run.rename(aside)
        for name in GONE:
            write(run, name)
        return True

    with pytest.raises(UsageError, match="expected a finished run"):
        clean_module.clean(RunDir.parse(str(run)), SystemClock(), agrees=agrees)
    assert files_of(aside) == files
    assert files_of(run) == GONE


def test_a_run_in_an_object_store_is_cleaned_in_the_same_way(run, capsys):
    """Events and logs are there in parts."""
    fs = fsspec.filesystem("memory")
    try:
        for name in files_of(run):
            if not name.startswith("events/") and "metrics" not in name:
                stored = name.replace("rank0.log", "rank0/000000000000.log")
                fs.pipe_file(f"/cleaned/{stored}", (run / name).read_bytes())
        (events,) = (run / "events").iterdir()
        fs.pipe_file("/cleaned/events/n1/000000000000.jsonl", events.read_bytes())
        before = {*fs.find("/cleaned")}

        assert main(["clean", "memory://cleaned", "--yes"]) == 0

        gone = {f"/cleaned/logs/00000{number}/rank0/000000000000.log" for number in (1, 2)}
        gone.add(f"/cleaned/{ATTEMPT}")
        assert before - {*fs.find("/cleaned")} == gone
    finally:
        fs.rm("/cleaned", recursive=True)
