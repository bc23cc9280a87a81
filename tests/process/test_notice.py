"""A preemption notice leads to a drain that loses nothing, and its command ends with the agent."""

import threading

import pytest

from elastic.agent.preemption import sources
from elastic.config.options import Options
from elastic.testing.fakes import FakeClock

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("true", "true"),
        ("false", None),
        ("/nowhere/at/all", "exits with 127"),
        ("sleep 10000", "longer than 10 s"),
    ],
)
def test_a_command_is_a_notice_where_it_exits_with_0(command, says):
    """One that does not exist, and one that runs for too long, give no answer."""
    options = Options(recipe="r.py", run_dir="r", notice_command=command)
    clock, is_over = FakeClock(), threading.Event()
    clock.monotonic = lambda: clock.sleep(4.0) or clock.now
    (source,) = sources(options, {}, is_over, clock)
    if command.startswith(("/", "sleep")):
        with pytest.raises((OSError, ValueError), match=says):
            source.ask()
    else:
        assert source.ask() == says
