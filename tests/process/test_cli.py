"""A command prints its result, or one sentence about a mistake, and ends with its exit code."""

import subprocess
import sys

import drawn_runs
import pytest


@pytest.mark.parametrize(
    ("argv", "says"),
    [
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


def test_reading_commands_import_neither_torch_nor_fsspec(tmp_path):
    """torch takes more than a second to import; one process is all of the commands in turn."""
    run = str(drawn_runs.write(tmp_path / "run", *drawn_runs.of_generations(1, 3)))
    code = (
        "import sys; from elastic.cli import main; run = sys.argv[1]\n"
        "print([main(words) for words in (['report', run], ['status', run], ['diff', run, run], ['verify', run])],"
        " {'elastic.observe.log', 'torch', 'fsspec'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0] {'elastic.observe.log'}"
