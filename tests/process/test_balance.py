"""Shards move from slow ranks to fast ones while a run trains, and its result stays the same."""

import run_records


def test_a_much_slower_rank_gets_fewer_shards(drills, tmp_path, recipes):
    """From the seconds that each rank says, with processes that load ahead; the result is that of
    one worker.
    """
    alone, slowed = (drills(tmp_path / name) for name in ("alone", "slowed"))
    recipe, seldom = recipes / "unequal.py", ("--save-every", "10min")
    alone.start(*seldom, recipe=recipe).ends_with(0)
    slowed.start(*seldom, "--nproc-per-node", "2", recipe=recipe).ends_with(0)

    assert slowed.values("run_finished", "digest") == alone.values("run_finished", "digest")
    chains = [[line["chain"] for line in run_records.lines(each.run.metrics)] for each in (alone, slowed)]
    assert chains[0] == chains[1] and alone.events("shards_moved") == []
    moved = slowed.events("shards_moved")
    assert moved and moved[0]["before"] == [4, 4] and moved[0]["shards"][1] < 4 < moved[0]["shards"][0]
