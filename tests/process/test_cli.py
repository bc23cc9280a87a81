import json
import os
import subprocess
import sys

import pytest

from elastic.cli import main
from elastic.events import GenerationStarted, RunFinished
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
from elastic.observe.step_line import StepLine
from elastic.system.clock import SystemClock

COMMAND = [sys.executable, "-m", "elastic.cli"]


@pytest.fixture
def make_run(tmp_path):
    def make(name, chains, digest):
        folder = tmp_path / name
        metrics = Metrics(folder / "metrics.jsonl")
        log = EventLog(folder / "events" / "n1.jsonl", node="n1", clock=SystemClock())
        log.generation = 1
        log.record(GenerationStarted(world_size=1, nodes=["n1"], cause="start", restarts=0))
        for step, chain in enumerate(chains, start=1):
            metrics.append(StepLine(step=step, chain=chain, generation=1, seconds=0.1, time=1.0))
        log.record(RunFinished(steps=len(chains), epochs=1, digest=digest))
        return str(folder)

    return make


def test_report_and_status_print_one_json_value(make_run, capsys):
    run = make_run("a", "abc", "d")

    assert main(["report", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["final_digest"] == "d"
    assert main(["status", "--json", run]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_diff_exits_1_at_the_first_step_that_differs(make_run, capsys):
    a, b = make_run("a", "abc", "d"), make_run("b", "axc", "e")

    assert main(["diff", a, a]) == 0
    capsys.readouterr()
    assert main(["diff", a, b, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first_difference"] == 2


def test_tables_name_what_the_json_holds(make_run, capsys):
    run = make_run("a", "abc", "the-digest")

    assert main(["report", run]) == 0
    assert main(["status", run]) == 0
    assert main(["verify", run]) == 0
    text = capsys.readouterr().out
    assert "the-digest" in text
    assert "finished" in text
    assert "no checkpoint was committed yet" in text


def test_verify_lists_a_commit_record_that_does_not_parse(make_run, capsys):
    """A record cut to half its bytes, as a disk that lied about a flush leaves it."""
    run = make_run("a", "abc", "d")
    folder = f"{run}/checkpoints/000000000002"
    subprocess.run(["mkdir", "-p", folder], check=True)
    with open(f"{folder}/COMMIT.json", "w") as file:  # noqa: PTH123 - a plain file is all it takes
        file.write('{"format": 1, "st')

    assert main(["verify", run, "--json"]) == 1
    assert [item["step"] for item in json.loads(capsys.readouterr().out)["damage"]] == [2]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["report", "no/such/run"], "expected a run directory, found nothing at"),
        (["verify", "no/such/run"], "expected a run directory, found nothing at"),
        (["no/such/recipe.py"], "found 'no/such/recipe.py', which is no file"),
        (["diff", "a"], "diff needs 2 run directories"),
        ([], "expected a recipe, found none"),
    ],
)
def test_a_mistake_exits_2_with_a_sentence(argv, says, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_help_stands_without_the_docs(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for part in ("examples:", "exit codes:", "what survives what:", "--min-nodes", "elastic-train diff"):
        assert part in text


@pytest.mark.parametrize("command", ["report", "status", "diff", "verify"])
def test_commands_that_only_look_do_not_import_torch(command, make_run):
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
    assert "torch" not in imported


def test_what_the_command_prints_arrives_whole_though_it_does_not_end_as_the_interpreter_does(capsys):
    assert main(["--help"]) == 0
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)

    assert done.stdout == capsys.readouterr().out
    assert done.stderr == ""


def test_a_reader_that_went_away_is_answered_with_exit_1_and_not_with_a_traceback():
    """As `elastic-train report RUN | head -1`, with a head that is gone before the first line."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [*COMMAND, "--help"], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(write_end)

    assert (done.returncode, done.stderr) == (1, "")
