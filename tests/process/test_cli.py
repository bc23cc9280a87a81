"""A command prints its result, or one sentence about a mistake, and ends with its exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic import cli
from elastic.cli import main
from elastic.events import GenerationStarted, RunFinished
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
from elastic.observe.step_line import StepLine
from elastic.system.clock import SystemClock
from elastic.system.interrupt import EXIT_CTRL_C

COMMAND = [sys.executable, "-m", "elastic.cli"]


@pytest.fixture
def make_run(tmp_path):
    def make(name, chains, digest):
        folder = tmp_path / name
        metrics = Metrics(folder / "metrics.jsonl", generation=1)
        log = EventLog(folder / "events" / "n1.jsonl", node="n1", clock=SystemClock())
        log.generation = 1
        log.record(GenerationStarted(world_size=1, nodes=["n1"], cause="start", restarts=0))
        for step, chain in enumerate(chains, start=1):
            metrics.append(StepLine(step=step, chain=chain * 16, generation=1, seconds=0.1, time=1.0))
        log.record(RunFinished(steps=len(chains), epochs=1, digest=digest))
        return str(folder)

    return make


def test_ctrl_c_before_training_ends_with_one_line(monkeypatch, capsys):
    """It comes while a command imports what it needs."""

    def interrupted(_words):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupted)
    assert main(["recipe.py"]) == EXIT_CTRL_C
    said = "elastic-train: interrupted before it trained anything; nothing is lost\n"
    assert capsys.readouterr() == ("", said)


def test_reading_commands_print_one_json_value_or_a_table(make_run, capsys):
    """`diff` exits with 1 where runs differ, and names the first step that does."""
    run, other = make_run("a", "abc", "the-digest"), make_run("b", "aec", "e")
    for words, code, name, expected in (
        (["report", run], 0, "final_digest", "the-digest"),
        (["status", run], 0, "state", "finished"),
        (["diff", run, run], 0, "first_difference", None),
        (["diff", run, other], 1, "first_difference", 2),
    ):
        assert main([*words, "--json"]) == code
        assert json.loads(capsys.readouterr().out)[name] == expected
    for command in ("report", "status", "verify"):
        assert main([command, run]) == 0
    text = capsys.readouterr().out
    assert "the-digest" in text and "finished" in text
    assert "no checkpoint was committed yet" in text


def test_verify_lists_a_commit_record_that_does_not_parse(make_run, capsys):
    """A record of which a disk kept only the first half."""
    run = make_run("a", "abc", "d")
    folder = f"{run}/checkpoints/000000000002"
    Path(folder).mkdir(parents=True)
    Path(folder, "COMMIT.json").write_text('{"format": 1, "st')

    assert main(["verify", run, "--json"]) == 1
    assert [item["step"] for item in json.loads(capsys.readouterr().out)["damage"]] == [2]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["report", "no/such/run"], "expected a run directory, found no run in"),
        (["verify", "tests"], "expected a run directory, found no run in"),
        (["no/such/recipe.py"], "found 'no/such/recipe.py', which is not a file"),
        (["diff", "a"], "RUN; write elastic-train diff"),
        (["status", "a", "--watch"], "unrecognized arguments: --watch; write elastic-train status"),
        (["watch"], "RUN; write elastic-train watch"),
        (["clean", "a", "--force"], "unrecognized arguments: --force"),
        (["serve", "a", "--listen", "x:99999"], "expected HOST:PORT"),
        (["check", "r.py", "--steps", "2"], "expected a whole number of at least 3"),
        (["check", "r.py", "--lr", "1", "--", "--steps"], "unrecognized arguments: --lr 1"),
        ([], "expected a recipe, found none"),
    ],
)
def test_a_mistake_exits_2_with_a_sentence_and_no_traceback(argv, says, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_the_help_explains_commands_options_and_exit_codes(capsys):
    """In 100 columns, and true: after a failed worker, training goes on from a snapshot."""
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for part in ("examples:", "exit codes:", "what survives what:", "--min-nodes", "elastic-train diff"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100
    assert "training goes on from the newest snapshot" in text


@pytest.mark.parametrize("command", ["report", "status", "diff", "verify"])
def test_reading_commands_import_neither_torch_nor_fsspec(command, make_run):
    """torch takes more than a second to import; the interpreter itself lists what was imported."""
    run = make_run("a", "abc", "d")
    argv = [command, run, run] if command == "diff" else [command, run]

    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "elastic.cli", *argv],
        capture_output=True,
        text=True,
        check=True,
    )

    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "elastic.observe.log" in imported or command == "verify"
    assert not {"torch", "fsspec"} & imported


def test_output_is_complete_although_os_exit_ends_the_process(capsys):
    assert main(["--help"]) == 0
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)

    assert done.stdout == capsys.readouterr().out
    assert done.stderr == ""


def test_a_closed_pipe_gives_exit_1_without_a_traceback():
    """As `elastic-train report RUN | head -1`, where head has ended before the first line."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [*COMMAND, "--help"], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(write_end)

    assert (done.returncode, done.stderr) == (1, "")
