"""A signal ends a command that imports with one line, whatever the import does with exceptions."""

import signal
import subprocess
import sys

import pytest

from elastic.errors import EXIT_INTERRUPTED
from elastic.system.interrupt import EXIT_CTRL_C, SENTENCE

# A shell's background job ignores Ctrl-C, and so would what it starts.
HEARD = "signal.signal(signal.SIGINT, signal.default_int_handler)"
BEGIN = f"import os, signal, sys\n{HEARD}\nfrom elastic.system import interrupt\n"
BOTH = "interrupt.end_at_once()\ninterrupt.end_at_once_by_sigterm()\n"
PRESS, TERMINATE = (f"os.kill(os.getpid(), signal.{name})" for name in ("SIGINT", "SIGTERM"))


def at_once(send: str) -> str:
    """In a block that catches everything, as around the import of an optional package."""
    return f"{BOTH}try:\n    {send}\nexcept BaseException:\n    print('it was lost')\n"


def across_exec(send: str) -> str:
    """In the moment in which the command replaces itself by another interpreter."""
    again = f"{BEGIN}{BOTH}print('it was lost')\n"
    return f"interrupt.hold()\n{send}\nos.execv(sys.executable, [sys.executable, '-c', {again!r}])\n"


def executed(text: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", BEGIN + text], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("text", [at_once, across_exec])
@pytest.mark.parametrize(("send", "code"), [(PRESS, EXIT_CTRL_C), (TERMINATE, EXIT_INTERRUPTED)])
def test_a_signal_ends_the_command_with_one_line(text, send, code):
    done = executed(text(send))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"{SENTENCE}\n")


@pytest.mark.parametrize(
    ("send", "code"), [(PRESS, EXIT_CTRL_C), (TERMINATE, EXIT_INTERRUPTED)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_raises_once_there_is_something_to_tidy_up(send, code):
    tidy = f"try:\n    {send}\nexcept KeyboardInterrupt as error:\n    sys.exit(interrupt.code_of(error))\n"
    done = executed(f"{BOTH}interrupt.raise_from_here()\n{tidy}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_a_second_signal_leaves_the_tidying_alone():
    tidy = (
        f"try:\n    {TERMINATE}\nexcept KeyboardInterrupt:\n    {TERMINATE}\n    {PRESS}\n    print('tidy')\n"
    )
    done = executed(f"{BOTH}interrupt.raise_from_here()\n{tidy}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "tidy\n", "")


def test_a_child_begins_with_what_a_new_interpreter_has():
    done = executed(f"{BOTH}interrupt.raise_from_here()\ninterrupt.restore()\n{TERMINATE}\n")
    assert done.returncode == -signal.SIGTERM
    done = executed(f"{BOTH}interrupt.restore()\n{PRESS}\n")
    assert "KeyboardInterrupt" in done.stderr


def test_a_command_that_ignores_ctrl_c_goes_on_ignoring_it():
    """A shell's background job."""
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + ignore + f"interrupt.end_at_once()\n{PRESS}\nprint('on')\n"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "on\n")
