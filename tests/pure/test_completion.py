"""A shell completes what the parsers accept."""

import os
import subprocess
import sys

import pytest

from elastic.cli import main


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("elastic-train sta", {"status"}),
        ("elastic-train completion ", {"bash", "zsh"}),
        ("elastic-train r.py --rdzv-backend ", {"dir", "c10d", "etcd"}),
        ("elastic-train recipes/qu", set()),  # the shell has names of files
    ],
)
def test_the_command_tells_the_shell_how_the_words_go_on(line, wanted, tmp_path):
    """As the script of argcomplete asks it."""
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    out = tmp_path / "out"
    subprocess.run(
        [sys.executable, "-m", "elastic.cli"],
        env={**os.environ, **asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(out)},
        cwd=tmp_path,
        check=True,
    )
    assert {word.strip() for word in out.read_text().splitlines()} == wanted


def test_bash_takes_the_script(capsys):
    assert main(["completion", "bash"]) == 0
    ask = f"{capsys.readouterr().out}\ncomplete -p elastic-train"
    done = subprocess.run(["bash", "--norc", "-c", ask], capture_output=True, text=True, check=True)
    assert "_python_argcomplete elastic-train" in done.stdout
    assert main(["completion", "fish"]) == 2
