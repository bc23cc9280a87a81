"""Ranks that hold different states are stopped, all of them, with the name of what differs."""

from dataclasses import asdict

import pytest
import torch
from steps import groups_of

from elastic.divergence import Divergence
from elastic.errors import RecipeNotExact, StatesDiffer
from elastic.proof.agreement import Comparison
from elastic.train.state.flat import FlatState, checksum_of


def answers_of(member, values, step, known_step, entry="model.b"):
    """Each rank holds its own value of an entry, and begins with the state of `step`.

    known_step: of the difference because of which it is begun with again. Returns the kind of
    error, its message and what it knows, or nothing.
    """
    state = FlatState(
        tensors={"model.a": torch.zeros(2), entry: torch.tensor([values[member.rank]])},
        document={"model": {}},
    )
    known = None
    if known_step is not None:
        known = Divergence(generation=3, step=known_step, agreed=0, entry="", votes=(1, 2), nodes=("a", "b"))
    comparison = Comparison(groups=groups_of(member), node=f"node{member.rank}", generation=4, log=None)
    try:
        comparison.check_same_state(checksum_of(state), step=step, known=known)
    except StatesDiffer as error:
        return ["machine?", str(error), asdict(error.divergence)]
    except RecipeNotExact as error:
        return ["recipe", str(error), None]
    return []


def test_one_rank_that_differs_stops_all_with_the_entrys_name(ranks):
    """Rank 1 has flipped the lowest bit of one number, as a pretrained file of another version or a
    bad memory would.
    """
    answers = ranks.run(3, answers_of, [1.0, 1.0000001, 1.0], 7, None)

    for kind, message, known in answers:
        assert kind == "machine?"
        assert "after step 7" in message
        assert "model.b" in message and "model.a" not in message
        assert "[0, 2] | [1]" in message
        assert (known["step"], known["agreed"], known["entry"]) == (7, 7, "model.b")
        assert known["nodes"] == ["node0", "node1", "node2"]
        first, other, third = known["votes"]
        assert first == third != other


def test_ranks_that_agree_go_on(ranks):
    assert ranks.run(3, answers_of, [1.0, 1.0, 1.0], 7, 7) == [[], [], []]


def test_ranks_that_differ_again_in_steps_done_again_are_told_that_it_is_the_recipe(ranks):
    """The step before, or the same: from one state, twice, the ranks came to different ones. A
    difference in a step that was not reached before is another event.
    """
    for step in (6, 7):
        for kind, message, _ in ranks.run(2, answers_of, [1.0, 2.0], step, 7):
            assert kind == "recipe"
            assert message.startswith(f"model.b differs between ranks [0] | [1] after step {step}. So it did")
            assert "draws from a generator of its own" in message
    assert [kind for kind, *_ in ranks.run(2, answers_of, [1.0, 2.0], 8, 7)] == ["machine?"] * 2


def test_objects_that_ranks_build_differently_are_the_recipes(ranks):
    """A redo may agree, because a file is there by then that one rank had read half written; the
    result would be that of other random numbers, and a machine would be blamed.
    """
    for known in (None, 0):
        (kind, message, _), _ = ranks.run(2, answers_of, [1.0, 2.0], 0, known)
        assert kind == "recipe" and "Every rank must build the same objects" in message
        assert "after elastic.start, without a rank in it" in message


def test_the_difference_is_recorded_before_any_rank_may_end():
    """The agent kills its other workers as soon as one ended: the last message between the ranks
    comes after the record.
    """
    order = []

    class Groups:
        def all_gather(self, value):
            order.append("message")
            return [value, value]

    class Log:
        def record(self, event):
            order.append("record")

    state = FlatState(tensors={"model.a": torch.zeros(2)}, document={"model": {}})
    comparison = Comparison(groups=Groups(), node="n", generation=4, log=Log())
    with pytest.raises(StatesDiffer):
        comparison.raise_difference(checksum_of(state), [1, 2], step=7, agreed=6, began=0, known=None)
    assert order.index("record") < len(order) - 1 and order[-1] == "message"


def differs(member, redo):
    """What a rank is told whose generation began at step 8, agreed at 16 and differs at 17."""
    state = FlatState(tensors={"model.b": torch.tensor([float(member.rank)])}, document={"model": {}})
    known = None
    if redo:  # only one node knows of it
        known = Divergence(generation=3, step=9, agreed=8, entry="", votes=(1, 2), nodes=("a", "b"))
    comparison = Comparison(
        groups=groups_of(member),
        node=f"node{member.rank}",
        generation=4,
        log=None,
        redo=known if member.rank else None,
    )
    try:
        comparison.raise_difference(checksum_of(state), [1, 2], step=17, agreed=16, began=8, known=None)
    except (StatesDiffer, RecipeNotExact) as error:
        return [type(error).__name__, str(error)]


def test_what_comes_again_as_many_steps_after_a_beginning_condemns_no_machine(ranks):
    """A function with a memory differs again and again, and agrees in each redo. The run ends, and
    no node is named.
    """
    for kind, message in ranks.run(2, differs, True):
        assert kind == "RecipeNotExact"
        assert "They differed about 9 steps after the last beginning too" in message
    assert {kind for kind, _ in ranks.run(2, differs, False)} == {"StatesDiffer"}
