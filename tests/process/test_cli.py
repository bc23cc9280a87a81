"""A command prints its result, or one sentence about a mistake, and ends with its exit code."""

import json
import subprocess
import sys
from dataclasses import replace

import drawn_runs
import pytest


@pytest.fixture
def make_run(tmp_path):
    """A finished run of three steps. chain: of the second."""

    def make(name, chain="0" * 16):
        events, (first, second, third) = drawn_runs.of_generations(1, 3)
        lines = [first, replace(second, chain=chain), third]
        return str(drawn_runs.write(tmp_path / name, events, lines))

    return make


def test_reading_commands_print_one_json_value_or_a_table(make_run, printed):
    """`diff` exits with 1 where runs differ, and names the first step that does."""
    run, other = make_run("a"), make_run("b", "e" * 16)
    for words, code, name, expected in (
        (["report", run], 0, "final_digest", "ab" * 32),
        (["status", run], 0, "state", "finished"),
        (["diff", run, run], 0, "first_difference", None),
        (["diff", run, other], 1, "first_difference", 2),
    ):
        assert json.loads(printed(code, *words, "--json"))[name] == expected
    text = "".join(printed(0, command, run) for command in ("report", "status", "verify"))
    assert "abab" in text and "finished" in text
    assert "no checkpoint was committed (a script" in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["report", "no/such/run"], "expected a run directory, found no run in"),
        (["no/such/recipe.py"], "found 'no/such/recipe.py', which is not a file"),
        (["status", "a", "--watch"], "unrecognized arguments: --watch; write elastic-train status"),
        (["serve", "a", "--listen", "x:99999"], "expected HOST:PORT"),
        (["check", "r.py", "--steps", "2"], "expected a whole number of at least 3"),
    ],
)
def test_a_mistake_exits_2_with_a_sentence_and_no_traceback(argv, says, printed):
    error = printed(2, *argv)
    assert says in error
    assert "Traceback" not in error


def test_the_help_explains_commands_options_and_exit_codes(printed):
    text = printed(0, "--help")
    for part in ("examples:", "exit codes:", "--min-nodes", "elastic-train diff"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100


def test_reading_commands_import_neither_torch_nor_fsspec(make_run):
    """torch takes more than a second to import; one process is all of the commands in turn."""
    run = make_run("a")
    code = (
        "import sys; from elastic.cli import main; run = sys.argv[1]\n"
        "print([main(words) for words in (['report', run], ['status', run], ['diff', run, run], ['verify', run])],"
        " {'elastic.observe.log', 'torch', 'fsspec'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0] {'elastic.observe.log'}"
