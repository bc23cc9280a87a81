"""Ranks that hold different states are stopped, all of them, with the name of what differs."""

import torch

from elastic.errors import StatesDiffer
from elastic.train.agreement import agree
from elastic.train.state import Parts
from elastic.train.world import World


def parts(value):
    return Parts(
        tensors={"model.a": torch.zeros(2), "model.b": torch.tensor([value])}, document={"model": {}}
    )


def agree_on(member, values):
    """Each rank holds its own value of model.b; returns the error's words, or nothing."""
    world = World(
        rank=member.rank,
        size=member.world_size,
        local_rank=member.rank,
        device=torch.device("cpu"),
        group=member.group,
        control=member.group,
    )
    try:
        return agree(world, parts(values[member.rank]), "after step 7")
    except StatesDiffer as error:
        return str(error)


def test_one_rank_that_differs_stops_all_with_the_entrys_name(ranks):
    """Rank 1 has flipped the lowest bit of one number, as a pretrained file of another version or a bad memory would."""
    answers = ranks.run(3, agree_on, [1.0, 1.0000001, 1.0])

    for answer in answers:
        assert "after step 7" in answer
        assert "model.b" in answer and "model.a" not in answer
        assert "[0, 2] | [1]" in answer


def test_ranks_that_agree_go_on(ranks):
    assert ranks.run(3, agree_on, [1.0, 1.0, 1.0]) == [None, None, None]
