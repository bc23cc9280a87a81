"""Shards move from slow ranks to fast ones while a run trains, and its result stays the same."""

import pytest
import run_records

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
TURN = {"TINY_TURN": "yes"}


def has_idle(drill):
    return any(0 in shards for (shards,) in drill.values("shards_moved", "shards"))


def test_spans_that_change_all_the_time_leave_the_same_bits(drill, undisturbed):
    """Three workers, of which some have no shard at times, with audits, snapshots and saves."""
    options = "--nproc-per-node", "3", "--audit", "3steps", "--snapshot-every", "2"
    drill.start(*options, env=TURN).ends_with(0)
    drill.is_like(undisturbed)
    assert len(drill.events("generation_started")) == 1
    assert len(drill.events("shards_moved")) >= 8 and has_idle(drill)


def test_kills_and_a_resume_among_changing_spans_leave_the_same_bits(drill, undisturbed):
    """Each generation begins with equal spans; the ranks that are killed have more or fewer."""
    plan = "step 7 rank 0 mid-sum: kill; step 12 rank 1 optimizer: kill"
    drill.start("--nproc-per-node", "2", "--faults", plan, env=TURN).ends_with(0)
    drill.is_like(undisturbed)
    assert {event["generation"] for event in drill.events("shards_moved")} == {1, 2, 3}
    assert has_idle(drill)
