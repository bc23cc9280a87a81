"""Shards move from slow ranks to fast ones while a run trains, and its result stays the same."""

import pytest
import run_records

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
TURN = {"TINY_TURN": "yes"}


def test_spans_that_change_all_the_time_leave_the_same_bits(drill, undisturbed_sum):
    """A loss over the whole batch, with audits and snapshots. A node with a worker joins at step 6,
    a rank is killed in step 10, and the node leaves at step 15.
    """
    options = ("--max-nodes", "2", "--last-call", "0s", "--audit", "3steps", "--snapshot-every", "2")
    options += ("--faults", "step 10 rank 1 mid-sum: kill")
    form = ("--form", "sum")
    drill.shut(6, 15)
    first = drill.start("--nproc-per-node", "2", *options, arguments=form, env=TURN)
    drill.stands(6, ranks=2)
    second = drill.start(*options, arguments=form, env=TURN)
    drill.happens("drain_requested", reason="a node is waiting to join")
    drill.open(6)
    drill.drains(second, 15, ranks=3)
    drill.ends_like(undisturbed_sum, first)
    assert {event["generation"] for event in drill.events("shards_moved")} == {1, 2, 3, 4}


def test_one_node_with_off_keeps_the_spans_of_all_equal(drill, undisturbed):
    """Nodes that cut differently would wait for each other for ever, or add up other shards."""
    options = "--max-nodes", "2", "--last-call", "10min"
    agents = [drill.start(*options, "--balance", how, env=TURN) for how in ("auto", "off")]
    drill.ends_like(undisturbed, *agents)
    assert drill.events("shards_moved") == []


def test_a_rank_that_is_three_times_slower_gets_fewer_shards(drills, tmp_path, recipes):
    """From the step's own seconds, with processes that load ahead; the result is that of one
    worker.
    """
    alone, slowed = (drills(tmp_path / name) for name in ("alone", "slowed"))
    recipe = recipes / "unequal.py"
    alone.start("--save-every", "10min", recipe=recipe).ends_with(0)
    plan = "step 1 rank 1: slow 0.01s"
    options = "--save-every", "10min", "--nproc-per-node", "2", "--faults", plan
    slowed.start(*options, recipe=recipe).ends_with(0)

    assert slowed.values("run_finished", "digest") == alone.values("run_finished", "digest")
    chains = [[line["chain"] for line in run_records.lines(each.run.metrics)] for each in (alone, slowed)]
    assert chains[0] == chains[1] and alone.events("shards_moved") == []
    moved = slowed.events("shards_moved")
    assert moved and moved[0]["before"] == [4, 4] and moved[0]["shards"][1] < 4 < moved[0]["shards"][0]
