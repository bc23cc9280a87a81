"""Where slow ranks have fewer shards, the report and the watch say so."""

from viewed import viewed

from elastic.events import GenerationStarted, ShardsMoved
from elastic.observe.logged_event import LoggedEvent
from elastic.report.figures import shards_text
from elastic.train.step.balancing import has_failed


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


def start(generation, cause):
    return at(generation, GenerationStarted(world_size=2, nodes=["a"], cause=cause, restarts=0))


def test_spans_stay_equal_after_two_failures_with_moved_shards():
    """Not after one, nor where a node joined in between, nor where nothing had moved."""
    failures, joined = (
        [start(2, "failure"), start(3, "failure")],
        [start(2, "node joined"), start(3, "failure")],
    )
    assert has_failed(3, failures, [moved(1, 6, 2), moved(2, 6, 2)])
    assert not has_failed(2, failures[:1], [moved(1, 6, 2)])
    assert not has_failed(3, joined, [moved(1, 6, 2), moved(2, 6, 2)])
    assert not has_failed(3, failures, [moved(2, 6, 2)])
    assert not has_failed(4, [*failures, start(4, "failure")], [moved(1, 6, 2), moved(2, 6, 2)])
