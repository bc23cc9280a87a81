"""Where slow ranks have fewer shards, the report and the watch say so."""

from viewed import viewed

from elastic.events import GenerationStarted, ShardsMoved
from elastic.observe.logged_event import LoggedEvent
from elastic.report.figures import shards_text


def at(generation, event):
    return LoggedEvent(time=float(generation), node="a", generation=generation, event=event)


def started(generation):
    return at(generation, GenerationStarted(world_size=2, nodes=["a"], cause="start", restarts=0))


def moved(generation, *shards):
    return at(generation, ShardsMoved(step=40, shards=list(shards), before=[4, 4]))


def test_the_newest_numbers_of_the_newest_generation_are_shown():
    """A new generation begins with equal spans, whatever the one before had."""
    assert viewed([started(1)]).shards_by_rank == []
    assert viewed([started(1), moved(1, 5, 3), moved(1, 6, 2)]).shards_by_rank == [6, 2]
    assert viewed([started(1), moved(1, 6, 2), started(2)]).shards_by_rank == []
    assert viewed([started(1), moved(1, 6, 2), started(2), moved(2, 2, 6)]).shards_by_rank == [2, 6]


def test_ranks_with_as_many_shards_are_counted_together():
    assert shards_text([3, 0, 3, 2]) == "0 on 1 rank; 2 on 1 rank; 3 on 2 ranks"
