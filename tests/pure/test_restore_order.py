"""Attacks on the order in which states are tried at a restore."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import RECORD

from elastic.divergence import Divergence
from elastic.errors import NothingLoads
from elastic.train.state.candidates import (
    AvailableStates,
    Candidate,
    OfferedSnapshot,
    RejectedState,
    check_none_is_missing,
    order_candidates,
)

STEPS = st.integers(1, 6)
MEMORY, STORED = False, True
CHECKSUMS = st.sampled_from(["a", "b"])


def record(step):
    return replace(RECORD, step=step)


def snapshot(step, checksum="a", generation=1):
    return OfferedSnapshot(step=step, checksum=checksum, generation=generation)


def checksums_at(found, step):
    return {each.checksum for of_rank in found for each in of_rank.snapshots if each.step == step}


def has(of_rank, step):
    return step in [each.step for each in of_rank.snapshots]


@st.composite
def available(draw) -> list[AvailableStates]:
    """Ranks with or without snapshots, some of them wrong, and a storage on rank 0 with or without
    damage.
    """
    found = []
    for rank in range(draw(st.integers(1, 4))):
        steps = sorted(draw(st.sets(STEPS, max_size=3)), reverse=True)
        stored = st.lists(STEPS, max_size=3 if rank == 0 else 0)
        damaged = [RejectedState(step=step, reason="torn", is_stored=True) for step in draw(stored)]
        found.append(
            AvailableStates(
                snapshots=tuple(snapshot(step, draw(CHECKSUMS)) for step in steps),
                records=tuple(map(record, draw(stored))),
                damaged=tuple(damaged),
            )
        )
    return found


def twin(found: list[AvailableStates]) -> list[tuple[int, bool]]:
    """The dumb way: walk down from the highest step, memory before storage."""
    usable = []
    for step in range(10, 0, -1):
        usable += [(step, MEMORY)] * (len(checksums_at(found, step)) == 1)
        usable += [(step, STORED) for c in found for r in c.records if r.step == step]
    return usable


@given(available())
def test_the_order_is_that_of_a_walk_down_the_steps(found):
    """Each candidate has the ranks that have it, and no state goes without a word."""
    candidates, rejected = order_candidates(found)
    assert [(c.step, c.is_stored) for c in candidates] == twin(found)
    for candidate in candidates:
        if candidate.record is None:
            assert candidate.ranks == tuple(r for r, c in enumerate(found) if has(c, candidate.step))
        else:
            assert candidate.ranks == (0,) and candidate.record in found[0].records
    seen = {(c.step, c.is_stored) for c in candidates} | {(r.step, r.is_stored) for r in rejected}
    for of_rank in found:
        assert all((each.step, MEMORY) in seen for each in of_rank.snapshots)
        assert all((each.step, STORED) in seen for each in (*of_rank.records, *of_rank.damaged))


@pytest.mark.parametrize(("again", "steps"), [(0, [9, 8, 5]), (9, [8, 9, 5]), (8, [9, 8, 5])])
def test_the_state_before_a_step_that_is_done_again_comes_first(again, steps):
    """If that step's own is the newest."""
    found = AvailableStates(snapshots=(snapshot(9), snapshot(8)), records=(record(5),))
    assert [each.step for each in order_candidates([found], again)[0]] == steps


def test_no_snapshot_after_the_last_agreed_step_is_used():
    """The agent of rank 1 did not see that the ranks differed, and kept what they had then.

    Rank 0 knows of it. A snapshot of an earlier generation may have a higher step, but is not of
    those steps.
    """
    known = Divergence(generation=4, step=9, agreed=7, entry="m.w")
    found = [
        AvailableStates(divergence=known, snapshots=(snapshot(7, generation=4),)),
        AvailableStates(snapshots=(snapshot(9, generation=4), snapshot(8, generation=3))),
    ]
    candidates, rejected = order_candidates(found)
    assert [c.step for c in candidates] == [8, 7]
    assert [(r.step, r.reason) for r in rejected] == [(9, "it was taken while the ranks' states differed")]


@pytest.mark.parametrize(
    ("candidates", "rejected", "is_missing"),
    [
        ([], [], True),
        ([(164, MEMORY)], [], True),
        ([(165, MEMORY)], [], False),
        ([(150, STORED)], [(165, STORED)], False),
        ([(150, STORED)], [(170, MEMORY)], True),
    ],
)
def test_an_older_state_needs_the_newest_commit_to_be_there(candidates, rejected, is_missing):
    """A damaged checkpoint is there; a damaged snapshot is no checkpoint."""
    found = [
        Candidate(step=step, ranks=(0,), record=record(step) if is_stored else None)
        for step, is_stored in candidates
    ]
    refused = [RejectedState(step=step, reason="torn", is_stored=is_stored) for step, is_stored in rejected]
    if not is_missing:
        check_none_is_missing(165, found, refused, "runs/a")
        return
    with pytest.raises(NothingLoads, match=r"has committed step 165, and neither .* has that state"):
        check_none_is_missing(165, found, refused, "runs/a")
