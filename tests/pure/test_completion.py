"""Real shells complete what the command accepts.

`elastic-train` is a function of the shell that prints the words it was given: what a user would run
after TAB and return.
"""

import os
import pty
import re
import select
import subprocess
import time

import apt
import pytest

from elastic.care.completion import OPTIONS, VALUES, script
from elastic.cli import main
from elastic.config.care_options import CARE, SHELLS
from elastic.config.options import CHECK, COMMANDS, FLAGS, SERVE, WATCH, reader_of

LIMIT_S = 120.0


class Shell:
    """An interactive shell on a terminal of its own."""

    def __init__(self, words: list[str], folder) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            words,
            cwd=folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(folder), "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        os.close(slave)
        self._seen = ""

    def types(self, text: str) -> None:
        os.write(self._master, text.encode())

    def shows(self, pattern: str) -> str:
        """Wait for it in what came since the last match."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, self._seen)) is None:
            assert time.monotonic() < deadline, self._seen
            if select.select([self._master], [], [], 1.0)[0]:
                self._seen += os.read(self._master, 4096).decode(errors="replace")
        self._seen = self._seen[found.end() :]
        return found[0]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


@pytest.fixture(params=SHELLS)
def shell(request, tmp_path):
    (tmp_path / "recipes").mkdir()
    for name in ("recipes/my own.py", "recipes/quick.py", "model.pt"):
        (tmp_path / name).write_text("")
    apt.need(request.param, request.param, otherwise=f"install {request.param}")
    (tmp_path / "completion").write_text(script(request.param))
    words = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
    ready = {"bash": "", "zsh": "autoload -Uz compinit; compinit -D -u; unsetopt zle_bracketed_paste; "}
    started = Shell(words[request.param], tmp_path)
    prints = 'elastic-train() { printf "GOT"; printf "<%s>" "$@"; echo; }'
    started.types(f"{ready[request.param]}source ./completion; {prints}; echo RE''ADY\n")
    started.shows("READY")
    yield started
    started.close()


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ("stat\t", "<status>"),
        ("compl\tz\t", "<completion><zsh>"),
        ("recip\tq\t", "<recipes/quick.py>"),
        ("recipes/my\t", "<recipes/my own.py>"),
        ("recipes/quick.py --rdzv-b\tet\t", "<recipes/quick.py><--rdzv-backend><etcd>"),
        ("clean --y\trec\t", "<clean><--yes><recipes>"),
        ("export recipes mod\t", "<export><recipes><model.pt>"),
    ],
)
def test_tab_completes_the_line(shell, typed, given):
    """Letters, TAB and return, as a user types them."""
    shell.types(f"elastic-train {typed}\r")
    # A folder may end in a slash.
    assert shell.shows(r"GOT[^\r\n]*[\r\n]").strip().replace("/>", ">") == f"GOT{given}"


def test_the_scripts_know_every_command_option_and_fixed_value():
    """An option that is added later is not forgotten here."""
    assert set(OPTIONS) == {CHECK, *COMMANDS, WATCH, SERVE, *CARE}
    for name, words in VALUES.items():
        for word in words.split():
            reader_of(name)(word)
            assert re.search(rf"{FLAGS[name]}\) words='[^']*\b{word}\b", script("bash"))


@pytest.mark.parametrize("words", [[], ["fish"], ["bash", "zsh"]])
def test_another_shell_is_refused(words, capsys):
    assert main(["completion", *words]) == 2
    assert "completion takes the name of a shell, bash or zsh" in capsys.readouterr().err


def test_the_command_prints_the_script(capsys):
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out == script("zsh")
