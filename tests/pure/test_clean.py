"""A finished run loses files that nothing reads, and answers as before, interrupted or not."""

import io
import json
import sys

import fsspec
import pytest
from committed import commit_in
from drawn_runs import write_whole
from records import IDENTITY
from torch import nn

from elastic.agent.run_directory import has_recorded_end
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


def write(run, name):
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"some bytes")


@pytest.fixture
def run(tmp_path):
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


def files_of(run):
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


def answers(run, printed):
    codes = {"report": 0, "status": 0, "verify": 1}  # one of its attempts is damaged
    said = [json.loads(printed(code, command, run, "--json")) for command, code in codes.items()]
    for each in said:
        each.pop("last_checkpoint", None)  # its age
    return [said, has_recorded_end(RunDir.parse(str(run)))]


@pytest.mark.parametrize("removed", [0, 1, len(GONE)])
def test_what_is_not_needed_goes_and_all_else_answers(removed, run, printed, monkeypatch):
    """Ctrl-C between two files; the same command then removes the rest."""
    before, files, remove = answers(run, printed), files_of(run), clean_module._remove
    left = iter(range(removed))

    def interrupted(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        remove(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(clean_module, "_remove", interrupted)
        printed(0 if removed == len(GONE) else 130, "clean", run, "--yes")
    assert len(files - files_of(run)) == removed
    assert answers(run, printed) == before
    assert json.loads(printed(0, "clean", run, "--yes", "--json"))["removed"] == len(GONE) - removed
    assert files_of(run) == files - GONE
    assert answers(run, printed) == before


@pytest.mark.parametrize("answer", ["n\n", "", "of course\n", "y\n"])
def test_without_a_yes_nothing_is_removed(answer, run, printed, monkeypatch):
    """Without a terminal to ask on, the command is refused."""
    files, terminal = files_of(run), io.StringIO(answer)
    monkeypatch.setattr(sys, "stdin", terminal)
    printed(2, "clean", run)
    printed(0, "clean", run, "--json")
    terminal.isatty = lambda: True
    assert files_of(run) == files
    out = printed(0, "clean", run)
    assert f"10 bytes  {ATTEMPT}  (an attempt that was not committed)" in out
    assert f"remove these {len(GONE)} files, {10 * len(GONE)} bytes in all?" in out
    assert files_of(run) == files - (GONE if answer == "y\n" else set())


def test_a_run_that_is_not_finished_is_refused(run, tmp_path, printed):
    (log,) = (run / "events").iterdir()
    log.write_text("".join(line for line in log.open() if "run_finished" not in line))
    files = files_of(run)
    (tmp_path / "empty").mkdir()
    for folder, says in ((run, "finished run, found that"), (tmp_path / "empty", "run directory, found no")):
        assert f"expected a {says}" in printed(2, "clean", folder, "--yes")
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


def test_a_run_in_an_object_store_is_cleaned_in_the_same_way(run, printed):
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

        printed(0, "clean", "memory://cleaned", "--yes")

        gone = {f"/cleaned/logs/00000{number}/rank0/000000000000.log" for number in (1, 2)}
        gone.add(f"/cleaned/{ATTEMPT}")
        assert before - {*fs.find("/cleaned")} == gone
    finally:
        fs.rm("/cleaned", recursive=True)
