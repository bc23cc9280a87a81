"""Ranks that hold different states are stopped, all of them, with the name of what differs."""

import torch

from elastic.errors import StatesDiffer
from elastic.train.consistency import check_same_snapshots, check_same_state
from elastic.train.process_groups import ProcessGroups
from elastic.train.state import FlatState, checksum_of


def parts(value):
    return FlatState(
        tensors={"model.a": torch.zeros(2), "model.b": torch.tensor([value])}, document={"model": {}}
    )


def groups_of(member):
    return ProcessGroups(
        rank=member.rank,
        world_size=member.world_size,
        local_rank=member.rank,
        device=torch.device("cpu"),
        gradients=member.group,
        control=member.group,
    )


def answers_of(member, values):
    """Each rank holds its own value of model.b; returns the error's message, or None."""
    try:
        return check_same_state(groups_of(member), checksum_of(parts(values[member.rank])), "after step 7")
    except StatesDiffer as error:
        return str(error)


def answers_with_snapshots(member, values, kept):
    """The same for ranks with snapshots of these checksums, or none; and whether states were
    flattened.
    """
    flattened = []
    state = parts(values[member.rank])

    def flatten():
        flattened.append(member.rank)
        return state

    try:
        check_same_snapshots(groups_of(member), kept[member.rank], flatten, "after step 7")
    except StatesDiffer as error:
        return str(error), bool(flattened)
    return "", bool(flattened)


def test_one_rank_that_differs_stops_all_with_the_entrys_name(ranks):
    """Rank 1 has flipped the lowest bit of one number, as a pretrained file of another version or a
    bad memory would.
    """
    answers = ranks.run(3, answers_of, [1.0, 1.0000001, 1.0])

    for answer in answers:
        assert "after step 7" in answer
        assert "model.b" in answer and "model.a" not in answer
        assert "[0, 2] | [1]" in answer


def test_ranks_that_agree_go_on(ranks):
    assert ranks.run(3, answers_of, [1.0, 1.0, 1.0]) == [None, None, None]


def test_equal_snapshots_save_a_second_pass_over_the_states(ranks):
    assert ranks.run(2, answers_with_snapshots, [1.0, 1.0], ["abc", "abc"]) == [["", False]] * 2


def test_a_rank_without_a_snapshot_makes_all_ranks_compare_states(ranks):
    assert ranks.run(2, answers_with_snapshots, [1.0, 1.0], ["abc", None]) == [["", True]] * 2
    for message, flattened in ranks.run(2, answers_with_snapshots, [1.0, 2.0], ["abc", None]):
        assert "model.b" in message and flattened


def test_snapshots_that_differ_make_all_ranks_compare_states(ranks):
    """A difference between states is named.

    One between copies alone is ignored here: a restore finds it.
    """
    for message, flattened in ranks.run(2, answers_with_snapshots, [1.0, 2.0], ["abc", "xyz"]):
        assert "model.b" in message and flattened
    assert ranks.run(2, answers_with_snapshots, [1.0, 1.0], ["abc", "xyz"]) == [["", True]] * 2
