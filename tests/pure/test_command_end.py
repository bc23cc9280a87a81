"""A signal ends a command that imports with one line, whatever the import does with exceptions.

Output that nothing takes is dropped, now and at the exit of the process.
"""

import os
import signal
import subprocess
import sys

import pytest

from elastic.errors import EXIT_INTERRUPTED
from elastic.system import stop_signals
from elastic.system.command_end import EXIT_CTRL_C, SENTENCE

# A shell's background job ignores Ctrl-C, and so would what it starts.
HEARD = "signal.signal(signal.SIGINT, signal.default_int_handler)"
BEGIN = f"import os, signal, sys\n{HEARD}\nfrom elastic.system import command_end\n"
WARNINGS = [each.name for each in stop_signals.WARNINGS]
BOTH = "command_end.end_at_once()\ncommand_end.end_at_once_by(command_end.stop_signals.ALL)\n"
PRESS, TERMINATE, *WARN = (
    f"os.kill(os.getpid(), signal.{name})" for name in ("SIGINT", "SIGTERM", *WARNINGS)
)
CODES = [(PRESS, EXIT_CTRL_C), (TERMINATE, EXIT_INTERRUPTED), (WARN[-1], EXIT_INTERRUPTED)]
IDS = ["ctrl-c", "sigterm", WARNINGS[-1]]
PRINT = "print_if_read('one', 'two', file=sys.stdout)\n"
DROP = "print('three')\nprint_if_read(file=sys.stdout)\n"


def executed(text):
    return subprocess.run([sys.executable, "-c", BEGIN + text], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("send", "code"), CODES, ids=IDS)
def test_a_signal_ends_the_command_with_one_line(send, code):
    """In a block that catches everything, as around the import of an optional package."""
    done = executed(f"{BOTH}try:\n    {send}\nexcept BaseException:\n    print('it was lost')\n")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"{SENTENCE}\n")


@pytest.mark.parametrize(("send", "code"), CODES, ids=IDS)
def test_a_signal_raises_once_there_is_something_to_tidy_up(send, code):
    tidy = f"try:\n    {send}\nexcept KeyboardInterrupt as error:\n    sys.exit(command_end.code_of(error))\n"
    done = executed(f"{BOTH}command_end.raise_from_here()\n{tidy}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_a_second_signal_leaves_the_tidying_alone():
    tidy = (
        f"try:\n    {WARN[0]}\nexcept KeyboardInterrupt:\n    {TERMINATE}\n    {PRESS}\n    print('tidy')\n"
    )
    done = executed(f"{BOTH}command_end.raise_from_here()\n{tidy}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "tidy\n", "")


def test_a_terminal_that_is_gone_keeps_the_exit_code():
    """Nothing takes what is written to the descriptor of a file that is open for reading."""
    close = "os.dup2(os.open(os.devnull, os.O_RDONLY), 2)\n"
    assert executed(f"{BOTH}{close}{WARN[-1]}\n").returncode == EXIT_INTERRUPTED


@pytest.mark.parametrize(("number", "send"), [("SIGINT", PRESS), ("SIGHUP", WARN[-1])])
def test_a_command_that_ignores_a_signal_goes_on_ignoring_it(number, send):
    """A shell's background job ignores Ctrl-C, and one of `nohup` the end of its terminal."""
    ignore = f"signal.signal(signal.{number}, signal.SIG_IGN)\n"
    done = executed(f"{ignore}{BOTH}{send}\ncommand_end.raise_from_here()\n{send}\nprint('on')\n")
    assert (done.returncode, done.stdout) == (0, "on\n")


def test_a_signal_that_is_no_request_ends_the_command():
    """--drain-signals none."""
    without = BOTH.replace("ALL", "END")
    assert executed(f"{without}{WARN[0]}\n").returncode == -signal.SIGUSR1


def ended(text, stdout):
    begin = "import sys\nfrom elastic.system.command_end import print_if_read\n"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", begin + text], stdout=stdout, env=buffered, check=False)
    return done.returncode


@pytest.mark.parametrize("text", [PRINT, DROP, PRINT + DROP])
def test_a_reader_that_is_gone_changes_no_exit_code(text):
    """A pipe without a reader. Without the call, the flush at the exit fails with 120."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ended(text, writer) == 0
        assert ended("print('three')\n", writer) == 120
    finally:
        os.close(writer)


def test_a_command_whose_output_is_closed_runs_as_any_other():
    """As `>&- 2>&-` in a shell: the interpreter then has no streams at all."""
    text = "from elastic.system import command_end as c; c.open_closed_streams(); print('one', flush=True)"
    subprocess.run(["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, text], check=True)
