"""A stop has a bound: when a drain cannot end, the grace does, and a second signal does at once."""

import signal

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def test_workers_that_do_not_drain_are_stopped_when_the_grace_is_over_or_at_a_second_signal(
    drill, undisturbed
):
    """A worker that stands in step 10 never reaches its end, with step 8 saved: first the grace ends it, after step 9, then a second signal."""
    drill.shut(10)
    agent = drill.start("--grace", "1s")
    drill.stands(10, ranks=1)
    drill.happens("checkpoint_committed", step=8)
    agent.signal(signal.SIGTERM)
    agent.ends_with(1)
    assert "after step 9, but step 8 is the newest that is saved" in agent.output
    drill.all_are_gone()

    agent = drill.start("--grace", "1h")
    drill.happens("restored", generation=2)
    agent.signal(signal.SIGTERM)
    drill.happens("drain_requested", generation=2)
    agent.signal(signal.SIGTERM)
    assert agent.wait() in (1, 75), agent.output
    assert "a second signal" in agent.output
    drill.all_are_gone()

    drill.open(10)
    drill.start().ends_with(0)
    drill.is_like(undisturbed)
