"""Real shells complete what the command accepts.

`elastic-train` is a function of the shell that prints the words it was given: what a user would run
after TAB and return.
"""

import argparse
import os
import pty
import re
import select
import subprocess
import time

import apt
import pytest

from elastic.care.completion import _OPTIONS, FILE_PATHS, FOLDER_PATHS, RUN_PATHS, VALUES, script
from elastic.cli import main
from elastic.config.care_options import CARE, SHELLS
from elastic.config.options import CHECK, COMMANDS, FLAGS, OPTIONS_HELP, SERVE, WATCH, reader_of

LIMIT_S = 120.0


@pytest.fixture
def place(tmp_path):
    """A folder with two recipes, one of a name with a space, and two runs."""
    for name in ("runs/first", "runs/second", "other", "recipes"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("first", "second"):
        (tmp_path / f"runs/{name}/run.json").write_text("{}")
    for name in ("recipes/quick.py", "recipes/my own.py", "recipes/data.csv", "notes.txt", "model.pt"):
        (tmp_path / name).write_text("")
    return tmp_path


def in_bash(place, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    program = f"""
{script("bash")}
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_elastic_train
((${{#COMPREPLY[@]}})) && printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "-c", program, "bash", "elastic-train", *words],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["st"], ["status"]),
        (["re"], ["recipes", "report"]),
        (["recipes/"], ["recipes/my own.py", "recipes/quick.py"]),
        (["recipes/quick.py", "--rdzv-e"], ["--rdzv-endpoint"]),
        (["--rdzv-backend", ""], ["c10d", "dir", "etcd"]),
        (["recipes/quick.py", "--audit", "o"], ["off"]),
        (["a.py", "--save-every", "=", "a"], ["auto"]),
        (["a.py", "--save-every", "="], ["auto"]),
        (["a.py", "--keep", ""], []),
        (["a.py", "--run-dir", "runs/f"], ["runs/first"]),
        (["a.py", "--rdzv-endpoint", "o"], ["other"]),
        (["a.py", "--notice-file", "no"], ["notes.txt"]),
        (["a.py", "--notice", ""], ["aws", "azure", "gcp"]),
        (["a.py", "--drain-signals", ""], ["HUP", "USR1", "USR2", "none"]),
        (["a.py", "--tensorboard", "o"], ["other"]),
        (["a.py", "--", "no"], ["notes.txt"]),
        (["report", ""], ["other", "recipes", "runs", "runs/first", "runs/second"]),
        (["diff", "runs/first", "runs/s"], ["runs/second"]),
        (["report", "--"], ["--html", "--json"]),
        (["verify", "--"], ["--json"]),
        (["diff", "a", "b", "--html", "no"], ["notes.txt"]),
        (["serve", "runs/s"], ["runs/second"]),
        (["serve", "runs/second", "--l"], ["--listen"]),
        (["watch", "runs/f"], ["runs/first"]),
        (["clean", "runs/first", "--y"], ["--yes"]),
        (["export", "runs/s"], ["runs/second"]),
        (["export", "runs/second", "mo"], ["model.pt"]),
        (["export", "runs/second", "no"], []),
        (["completion", ""], ["bash", "zsh"]),
        (["check", "recipes/q"], ["recipes/quick.py"]),
    ],
)
def test_bash_offers_what_fits(words, offered, place):
    assert in_bash(place, *words) == offered


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
def shell(request, place):
    apt.need(request.param, request.param, otherwise=f"install {request.param}")
    (place / "completion").write_text(script(request.param))
    words = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
    ready = {"bash": "", "zsh": "autoload -Uz compinit; compinit -D -u; unsetopt zle_bracketed_paste; "}
    started = Shell(words[request.param], place)
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
        ("reci\tq\t", "<recipes/quick.py>"),
        ("recipes/my\t", "<recipes/my own.py>"),
        ("recipes/quick.py --rdzv-b\tet\t", "<recipes/quick.py><--rdzv-backend><etcd>"),
        ("recipes/quick.py --from runs/f\t", "<recipes/quick.py><--from><runs/first>"),
        ("report runs/s\t", "<report><runs/second>"),
        ("clean --y\truns/f\t", "<clean><--yes><runs/first>"),
        ("export runs/first mod\t", "<export><runs/first><model.pt>"),
        ("recipes/quick.py -- note\t", "<recipes/quick.py><--><notes.txt>"),
    ],
)
def test_tab_completes_the_line(shell, typed, given):
    """Letters, TAB and return, as a user types them."""
    shell.types(f"elastic-train {typed}\r")
    # zsh takes the slash behind a folder back where the line ends.
    assert shell.shows(r"GOT[^\r\n]*[\r\n]").strip().replace("/>", ">") == f"GOT{given}"


def test_the_scripts_know_every_command_option_and_fixed_value():
    """An option that is added later is not forgotten here."""
    assert set(_OPTIONS) == {CHECK, *COMMANDS, WATCH, SERVE, *CARE}
    for shell in SHELLS:
        assert all(re.search(rf"[ '|]{flag}[ '|)]", script(shell)) for flag in FLAGS.values())
    for name, values in VALUES.items():
        for value in values:
            reader_of(name)(value)
    assert {*VALUES, *RUN_PATHS, *FOLDER_PATHS, *FILE_PATHS} <= FLAGS.keys()


def accepts(read, word: str) -> bool:
    try:
        read(word)
    except (argparse.ArgumentTypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("name", FLAGS)
def test_every_fixed_value_that_help_names_and_the_parser_takes_is_offered(name):
    """Of options that take not just any text; a value that begins with a digit is a number."""
    read = reader_of(name)
    if read is None or name in RUN_PATHS or accepts(read, "no-such-value"):
        assert name not in VALUES
        return
    words = set(re.findall(r"(?<![\w-])[A-Za-z]\w+", part_of_help(FLAGS[name])))
    assert {word for word in words if accepts(read, word)} == set(VALUES.get(name, ()))


def test_every_option_with_a_path_is_in_a_table():
    """What the help calls a folder, a run, or a file behind the option."""
    metavars = {name: re.match(rf"{flag} ([A-Z]+)\b", part_of_help(flag)) for name, flag in FLAGS.items()}
    called = {name: found[1] for name, found in metavars.items() if found}
    paths = {name for name, word in called.items() if word in {"URL", "RUN", "DIR", "PATH", "FILE", "FOLDER"}}
    assert {*RUN_PATHS, *FOLDER_PATHS, *FILE_PATHS} == {*paths, "rdzv_endpoint"}


def part_of_help(flag: str) -> str:
    (part,) = re.findall(rf"^  ({flag}(?= |$).*(?:\n   .*)*)", OPTIONS_HELP, re.MULTILINE)
    return part


@pytest.mark.parametrize("words", [[], ["fish"], ["bash", "zsh"]])
def test_another_shell_is_refused(words, capsys):
    assert main(["completion", *words]) == 2
    assert "completion takes the name of a shell, bash or zsh" in capsys.readouterr().err


def test_the_command_prints_the_script(capsys):
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out == script("zsh")
