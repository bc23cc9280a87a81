"""A finished run loses files that nothing reads, and answers as before, wherever it is interrupted.

Attempts and drafts are aged by `os.utime`: their ages are those that the file system shows.
"""

import io
import json
import os
import shutil
import sys
import time
from pathlib import Path

import fsspec
import pytest
from committed import commit_in
from long_run import IDENTITY, write_long_run
from torch import nn

from elastic.agent.finished_run import has_recorded_end
from elastic.care import clean as clean_module
from elastic.care.leftovers import StoredFile, leftovers
from elastic.checkpoint.find_parent import find
from elastic.cli import main
from elastic.config.parent import Origin
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.rendezvous.first_look import Holder
from elastic.rendezvous.lease import LeaseRenewal, RunLease
from elastic.system.clock import SystemClock
from elastic.train.state.state import State

CLOCK = SystemClock()
DAY_S = 86400.0
HEX = "0123456789abcdef"
ATTEMPT = "checkpoints/000000000020/a-000001-12345678/state.safetensors"
AGED = (
    ATTEMPT,
    f"checkpoints/000000000020/.COMMIT.json.{HEX}",
    f".run.json.{HEX}",
    f"..metrics-000001.jsonl.{HEX}",
    f"rendezvous/.elastic-{HEX * 2}",
)
GONE = {
    *AGED,
    "logs/000001/rank0.log",
    "logs/000002/rank0.log",
    "rendezvous/beats/n1",
    "rendezvous/requests/n1,join",
}
STAYING = {
    "logs/000003/rank0.log",
    "rendezvous/state-000000000007.json",
    "rendezvous/generation",
    "data.json",
    f".own.{HEX}",
    "own/checkpoints/000000000020/a-000001-12345678/state.safetensors",
    "faults/x/1.1",
}


def write(run: Path, name: str, *, age_s: float = 0.0) -> None:
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"some bytes")
    then_s = time.time() - age_s
    os.utime(path, (then_s, then_s))


@pytest.fixture
def run(tmp_path) -> Path:
    """Finished, in three generations, with two committed states and what such runs leave."""
    folder = write_long_run(tmp_path / "run", 120)
    for step in (60, 120):
        commit_in(folder, IDENTITY, step, State(model=nn.Linear(3, 1)))
    for name in GONE | STAYING:
        write(folder, name, age_s=DAY_S if name in AGED or name.startswith(".own") else 0.0)
    return folder


def files_of(run: Path) -> set[str]:
    return {
        str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and "lease" not in path.parts
    }


def answers(run: Path, capsys) -> list:
    """What commands say of the run, and its bytes as those of the state that another run begins
    from.
    """
    capsys.readouterr()
    codes = [
        main([command, str(run), *more, "--json"])
        for command, *more in (("report",), ("status",), ("verify",), ("diff", str(run)))
    ]
    said = [json.loads("{" + part) for part in capsys.readouterr().out.split("\n{")[1:]]
    for each in said:
        each.pop("last_checkpoint", None)  # its age
    parent = find(Origin.parse(str(run)), CLOCK, print)
    return [codes, said, parent.step, parent.digest, has_recorded_end(RunDir.parse(str(run)))]


def test_what_is_not_needed_goes_and_all_else_stays_and_answers(run, capsys):
    before, files = answers(run, capsys), files_of(run)

    assert main(["clean", str(run), "--yes", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in found["files"]} == GONE
    assert (found["removed"], found["size_bytes"]) == (len(GONE), 10 * len(GONE))
    assert files_of(run) == files - GONE
    assert not (run / "logs/000001").exists()
    assert answers(run, capsys) == before
    assert main(["clean", str(run), "--yes"]) == 0
    assert "nothing that it does not need" in capsys.readouterr().out


@pytest.mark.parametrize("removed", range(len(GONE)))
def test_after_an_interrupt_between_any_two_files_the_run_answers_as_before(
    removed, run, capsys, monkeypatch
):
    """Ctrl-C in the middle; the same command then removes the rest."""
    before, files, remove = answers(run, capsys), files_of(run), clean_module._remove

    def interrupted(run, leftover, clock, done, total):
        if done == removed:
            raise KeyboardInterrupt
        remove(run, leftover, clock, done, total)

    with monkeypatch.context() as patch:
        patch.setattr(clean_module, "_remove", interrupted)
        assert main(["clean", str(run), "--yes"]) == 130
    assert len(files - files_of(run)) == removed
    assert answers(run, capsys) == before
    assert main(["clean", str(run), "--yes"]) == 0
    assert files_of(run) == files - GONE


def test_without_a_yes_nothing_is_removed(run, capsys, monkeypatch):
    """The list with the sizes is shown, and anything but y or yes is a no; without a terminal the
    command is refused.
    """
    files = files_of(run)
    assert main(["clean", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == 0
    for answer in ("n\n", "", "\n", "of course\n"):
        terminal = io.StringIO(answer)
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", terminal)
        assert main(["clean", str(run)]) == 0
        out = capsys.readouterr().out
        assert f"10 bytes  {ATTEMPT}  (an attempt that was not committed)" in out
        assert f"remove these {len(GONE)} files, {10 * len(GONE)} bytes in all?" in out
    assert files_of(run) == files
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["clean", str(run)]) == 2
    assert "expected a terminal to ask on" in capsys.readouterr().err
    terminal = io.StringIO("y\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["clean", str(run)]) == 0
    assert files_of(run) == files - GONE


def test_an_attempt_is_kept_while_a_writer_may_commit_it_or_a_damaged_record_may_name_it(run, capsys):
    young = ATTEMPT.replace("12345678", "abcdefab")
    write(run, young, age_s=600.0)
    damaged = "checkpoints/000000000060/a-000001-12345678/state.safetensors"
    write(run, damaged, age_s=DAY_S)
    (run / "checkpoints/000000000060/COMMIT.json").write_text("{")

    main(["clean", str(run), "--yes"])

    assert {young, damaged} <= files_of(run)
    assert ATTEMPT not in files_of(run)


def test_ages_are_those_of_the_storage_and_not_of_this_machine(run):
    """The clock of a file server is days ahead: an attempt that was written a minute ago is young.
    Another file has a time of the far future, as copied files may.
    """
    times = {"lease/000001-renewed": 10 * DAY_S, ATTEMPT: 10 * DAY_S - 60.0, "own": 99 * DAY_S}
    files = [StoredFile(name=name, size_bytes=1, changed_s=at) for name, at in times.items()]
    assert leftovers(files, [], [], now_s=10 * DAY_S) == []
    unknown = [StoredFile(name=ATTEMPT, size_bytes=1, changed_s=None)]
    assert leftovers(unknown, [], [], now_s=10 * DAY_S) == []


def test_a_run_that_is_not_finished_is_refused(run, capsys):
    files = files_of(run)
    (log,) = (run / "events").iterdir()
    log.write_text("".join(line for line in log.open() if "run_finished" not in line))
    assert main(["clean", str(run), "--yes"]) == 2
    assert "expected a finished run, found that" in capsys.readouterr().err
    assert files_of(run) == files


def test_a_run_that_live_nodes_hold_is_refused(run, capsys):
    """A node of the finished run is still there: it renews the lease."""
    held = RunLease(str(run), CLOCK)
    lease = held.take(
        "etcd", keep_alive_s=2.0, holder=lambda _: Holder.ELSEWHERE, check=lambda: None, notify=print
    )
    renewal = LeaseRenewal(held, lease, leads=lambda: True, is_in=lambda: True, on_lost=print)
    files = files_of(run)
    try:
        assert main(["clean", str(run), "--yes"]) == 2
    finally:
        renewal.stop(releases=True)
    error = capsys.readouterr().err
    assert "nothing was removed, since nodes may still need it" in error
    assert "is in use: etcd trains in it" in error
    assert files_of(run) == files


def test_a_clean_that_stood_still_removes_nothing_of_a_run_that_began_there_meanwhile(run):
    """While a person thinks, the process is stopped, and --fresh gives the name to another run."""
    run_dir = RunDir.parse(str(run))

    def agrees(_files):
        lease = RunLease(run_dir.url, CLOCK)
        (run / f"lease/{lease.newest().number + 1:06d}").write_bytes(b"of another command")
        return True

    files = files_of(run)
    with pytest.raises(UsageError, match="took the run directory over while this one stood still"):
        clean_module.clean(run_dir, CLOCK, agrees=agrees, notify=print)
    assert files_of(run) == files


@pytest.mark.parametrize("words", [[], ["a", "b"], ["a", "--force"]])
def test_a_command_line_that_is_not_as_expected_is_refused(words, capsys):
    assert main(["clean", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    assert main(["clean", str(tmp_path), "--yes"]) == 2
    assert "found no run in" in capsys.readouterr().err


def test_a_file_that_cannot_be_removed_ends_the_command_with_a_sentence(run, capsys):
    """A folder has become a link out of the run directory meanwhile: nothing behind it goes."""
    outside = run.parent / "outside"
    shutil.move(run / "rendezvous/beats", outside)
    (run / "rendezvous/beats").symlink_to(outside)
    main(["clean", str(run), "--yes"])
    assert (outside / "n1").exists()


def test_a_run_in_an_object_store_is_cleaned_in_the_same_way(run, capsys):
    """Events and logs are there in parts. Its objects are as young as the test: attempts stay."""
    fs = fsspec.filesystem("memory")
    try:
        for path in run.rglob("*"):
            if path.is_file() and path.parent.name not in ("events", "lease") and "metrics" not in path.name:
                name = str(path.relative_to(run))
                name = name.replace("rank0.log", "rank0/000000000000.log")
                fs.pipe_file(f"/cleaned/{name}", path.read_bytes())
        (events,) = (run / "events").iterdir()
        fs.pipe_file("/cleaned/events/n1/000000000000.jsonl", events.read_bytes())

        assert main(["clean", "memory://cleaned", "--yes", "--json"]) == 0

        found = json.loads(capsys.readouterr().out)
        assert {each["name"] for each in found["files"]} == {
            "logs/000001/rank0/000000000000.log",
            "logs/000002/rank0/000000000000.log",
            "rendezvous/beats/n1",
            "rendezvous/requests/n1,join",
        }
        assert not fs.exists("/cleaned/logs/000001")
        assert fs.exists("/cleaned/logs/000003/rank0/000000000000.log")
        assert main(["verify", "memory://cleaned"]) == 0
    finally:
        fs.rm("/cleaned", recursive=True)
