"""What leaves a loop, what ends with it, and what ranks learn of each other then."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from elastic.errors import UsageError
from elastic.train.groups import ProcessGroups
from elastic.train.loop.ends import LEFT, LoopEnd
from elastic.train.loop.leaving import explain_loss
from elastic.train.step.parts import StepPlace
from elastic.worker import script_end

END = 6


class Loop:
    """The trainer's loop without training; `weight` is its state."""

    def __init__(self):
        self.step = self.left = self.caught = None
        self.weight = 0
        self.parts = SimpleNamespace(state=SimpleNamespace(sharded=None))
        self.said = []
        self.place = StepPlace(1, passes=0, computed=False)
        self.groups = ProcessGroups(rank=0, world_size=1, local_rank=0, device=None)

    def run(self):
        for number in range(1, END + 1):
            self.step = number
            yield number
            self.step = None

    def leave(self, reason):
        assert self.step is not None
        if self.caught is not None:
            raise self.caught
        self.step, self.left = None, (reason, self.weight)

    def own_checksum(self):
        return str(self.weight)

    def say(self, sentence):
        self.said.append(sentence)


class Stop(Exception):  # noqa: N818
    pass


def by_break(loop, steps):
    for number in steps():
        if number == 3:
            break
    loop.weight = 1


def by_an_exception_that_is_caught(_loop, steps):
    with contextlib.suppress(Stop):
        for number in steps():
            if number == 3:
                raise Stop


def ending():
    loop, ended = Loop(), []
    return loop, LoopEnd(loop, lambda: ended.append(loop.left)), ended


@pytest.mark.parametrize("settle", [LoopEnd.script_ended, LoopEnd.settle])
@pytest.mark.parametrize("way", [by_break, by_an_exception_that_is_caught])
def test_a_way_out_ends_the_run_while_the_state_is_the_steps(way, settle, monkeypatch):
    """A break or return before the next line of the recipe, which changes the state; any other way
    with the script, or where ranks meet before: until then an exception may have been on its way.
    A caught error of a step ends the run all the same:
    `except Exception` around the loop would make an early end of it, and so would a `break`.
    """
    loop, end, ended = ending()
    way(loop, end.steps)
    assert ended == [(LEFT, 0)] * (way is by_break)
    settle(end)
    assert ended == [(LEFT, 0)]

    error, found = UsageError("ended without gradients"), []
    monkeypatch.setattr(script_end, "fail", found.append)
    loop, end, ended = ending()
    loop.caught = error
    way(loop, end.steps)
    with contextlib.suppress(UsageError):
        end.script_ended()
        assert found == [error]
    assert ended == []


def test_a_state_that_changed_before_the_end_was_seen_is_refused():
    """The change is the recipe's first line after the loop."""
    loop, end, ended = ending()
    by_an_exception_that_is_caught(loop, end.steps)
    loop.weight = 1
    with pytest.raises(UsageError, match="changed the state"):
        end.script_ended()
    assert ended == []


@pytest.mark.parametrize("error", [UsageError("found it"), SystemExit(75)])
def test_a_caught_error_of_the_iterator_is_raised_at_the_end(error):
    """The loop is over, so that nothing else would tell; a drain is such an error too."""
    loop, end, ended = ending()

    def fails():
        yield 1
        raise error

    loop.run = fails
    with contextlib.suppress(type(error)):
        list(end.steps())
    with pytest.raises(type(error)) as raised:
        end.script_ended()
    assert (raised.value, ended) == (error, [])


def test_a_second_loop_over_the_steps_is_refused():
    """A process that restarts at a later step begins with the first loop."""
    loop, end, _ = ending()
    steps = end.steps()
    by_break(loop, lambda: steps)
    with pytest.raises(UsageError, match="a second loop"):
        by_break(loop, lambda: steps)


@pytest.mark.parametrize(
    ("left", "mine", "is_behind"),
    [
        ((9, 1, True), (10, 0, False), True),  # after its step's gradients; this rank went on
        ((9, 0, False), (9, 1, False), True),  # before them; this rank computes them
        ((9, 1, True), (9, 1, True), False),  # this rank may be about to leave too
        ((9, 1, True), (8, 1, True), False),  # this rank is not there yet, and lost another peer
    ],
)
def test_a_rank_past_the_place_where_another_left_is_told_so(left, mine, is_behind):
    """Its wait ended because the other one closed its groups, which looks like a death."""
    store = dist.HashStore()
    first, second = (
        ProcessGroups(rank=rank, world_size=2, local_rank=rank, device=None, store=store) for rank in range(2)
    )
    there, here = StepPlace(*left), StepPlace(*mine)
    assert explain_loss(first, here) is None
    second.tell("left", json.dumps(there))
    found = explain_loss(first, here)
    assert (found is not None) == is_behind
    assert explain_loss(second, here) is None
    if found is not None:
        assert f"rank 1 left the loop in step {left[0]}, " in str(found)
        first.tell("left", json.dumps(there))  # it left too, and is past that: rank 1 has died since
        assert explain_loss(first, here) is None
