"""Output that nothing takes is dropped, now and at the exit of the process."""

import os
import subprocess
import sys

import pytest

PRINT = "print_if_read('one', 'two', file=sys.stdout)\n"
DROP = "print('three')\nprint_if_read(file=sys.stdout)\n"


def ended(text, stdout):
    begin = "import sys\nfrom elastic.system.command_end import print_if_read\n"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-c", begin + text]
    return subprocess.run(words, stdout=stdout, env=buffered, check=False).returncode


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
    text = (
        "from elastic.system import command_end; command_end.open_closed_streams(); print('one', flush=True)"
    )
    subprocess.run(["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, text], check=True)
