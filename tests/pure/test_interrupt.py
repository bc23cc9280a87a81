"""Ctrl-C ends a command that imports with one line, whatever the import does with exceptions."""

import subprocess
import sys

import pytest

from elastic.system.interrupt import EXIT_CTRL_C, SENTENCE

PRESS = "os.kill(os.getpid(), signal.SIGINT)"
BEGIN = "import os, signal, sys\nfrom elastic.system import interrupt\n"
AT_ONCE = f"interrupt.end_at_once()\ntry:\n    {PRESS}\nexcept BaseException:\n    print('it was lost')\n"
AGAIN = BEGIN + "interrupt.end_at_once()\nprint('it was lost')\n"
ACROSS_EXEC = f"interrupt.hold()\n{PRESS}\nos.execv(sys.executable, [sys.executable, '-c', {AGAIN!r}])\n"


@pytest.mark.parametrize("text", [AT_ONCE, ACROSS_EXEC], ids=["in an import", "across a restart"])
def test_ctrl_c_ends_the_command_with_one_line(text):
    """In a block that catches everything, as around the import of an optional package; and in the
    moment in which the command replaces itself by another interpreter.
    """
    done = subprocess.run([sys.executable, "-c", BEGIN + text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_CTRL_C, "", f"{SENTENCE}\n")


def test_ctrl_c_raises_again_once_there_is_something_to_tidy_up():
    text = f"interrupt.end_at_once()\ninterrupt.raise_from_here()\ntry:\n    {PRESS}\nfinally:\n    print('tidy')\n"
    done = subprocess.run([sys.executable, "-c", BEGIN + text], capture_output=True, text=True, check=False)
    assert done.stdout == "tidy\n"
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
