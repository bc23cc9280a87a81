"""A preemption notice leads to a drain that loses nothing, and its command ends with the agent."""

import threading

import pytest

from elastic.agent.preemption import sources
from elastic.config.options import Options
from elastic.testing.fakes import FakeClock

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def test_a_notice_in_a_file_drains_and_no_step_is_lost(drill, undisturbed):
    """The file appears while the worker is held before step 10.

    A command that never answers runs meanwhile, and must be gone with its agent.
    """
    notice = drill.folder / "going-away"
    options = ["--notice-file", str(notice), "--notice-command", "sleep 10000"]
    drill.shut(10)
    agent = drill.start(*options)
    drill.stands(10, ranks=1)
    notice.touch()
    asked = drill.happens("drain_requested")
    assert asked["reason"] == f"a notice ({notice}) asks this node to leave"
    drill.open(10)
    agent.ends_with(75)
    assert drill.last_step == 10
    drill.all_are_gone()

    notice.unlink()
    drill.start(*options).ends_with(0)
    (resumed,) = drill.events("restored", generation=2)
    assert (resumed["step"], resumed["lost_steps"]) == (10, 0)
    drill.is_like(undisturbed)


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
