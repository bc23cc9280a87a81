"""A preemption notice leads to a drain that loses nothing, and its command ends with the agent."""

import pytest

from elastic.agent import preemption
from elastic.agent.preemption import sources
from elastic.config.options import Options

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("true", "true"),
        ("false", None),
        ("/nowhere/at/all", "exits with 127"),
        ("sleep 10000", "longer than 0.1 s"),
    ],
)
def test_a_command_is_a_notice_where_it_exits_with_0(command, says, monkeypatch):
    """One that does not exist, and one that runs for too long, give no answer."""
    options = Options(recipe="r.py", run_dir="r", notice_command=command)
    monkeypatch.setattr(preemption, "COMMAND_S", 0.1)
    (source,) = sources(options)
    if command.startswith(("/", "sleep")):
        with pytest.raises((OSError, ValueError), match=says):
            source.ask()
    else:
        assert source.ask() == says
