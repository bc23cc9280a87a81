"""Attacks on the order in which states are tried at a restore."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from records import RECORD

from elastic.train.restore_order import (
    RESTORES_OF_ONE_STATE,
    AvailableStates,
    RejectedState,
    order_candidates,
)

STEPS = st.integers(1, 6)
MEMORY, STORED = False, True
CHECKSUMS = st.sampled_from(["a", "b"])


def record(step):
    return replace(RECORD, step=step)


@st.composite
def available(draw) -> list[AvailableStates]:
    """Ranks with or without snapshots, some of them wrong, whose agents counted different failures,
    and a storage on rank 0 with or without damage.
    """
    ranks = draw(st.integers(1, 4))
    found = []
    for rank in range(ranks):
        step = draw(st.none() | STEPS)
        records = tuple(record(s) for s in draw(st.lists(STEPS, max_size=3))) if rank == 0 else ()
        damaged = (
            tuple(
                RejectedState(step=s, reason="torn", is_stored=True)
                for s in draw(st.lists(STEPS, max_size=2))
            )
            if rank == 0
            else ()
        )
        checksum = None if step is None else draw(CHECKSUMS)
        failures = draw(st.integers(0, 12))
        found.append(
            AvailableStates(
                failures=failures,
                snapshot_step=step,
                snapshot_checksum=checksum,
                records=records,
                damaged=damaged,
            )
        )
    return found


def twin(found: list[AvailableStates]) -> list[tuple[int, bool]]:
    """The dumb way: walk down from the highest step, memory before storage."""
    usable = []
    for step in range(10, 0, -1):
        sums = {c.snapshot_checksum for c in found if c.snapshot_step == step}
        here = [(step, MEMORY)] if len(sums) == 1 else []
        here += [(step, STORED) for c in found for r in c.records if r.step == step]
        if here:
            usable.append(here)
    failures, skip = max(of_rank.failures for of_rank in found), 0
    while failures > RESTORES_OF_ONE_STATE and skip + 1 < len(usable):
        failures -= RESTORES_OF_ONE_STATE
        skip += 1
    return [each for here in usable[skip:] for each in here]


@given(available())
def test_the_order_is_that_of_a_walk_down_the_steps(found):
    candidates, _ = order_candidates(found)
    assert [(c.step, c.is_stored) for c in candidates] == twin(found)


@given(available())
def test_a_candidates_ranks_are_exactly_those_that_have_it(found):
    candidates, _ = order_candidates(found)
    for candidate in candidates:
        if candidate.record is None:
            assert candidate.ranks == tuple(
                r for r, c in enumerate(found) if c.snapshot_step == candidate.step
            )
            assert len({found[r].snapshot_checksum for r in candidate.ranks}) == 1
        else:
            assert candidate.ranks == (0,)
            assert candidate.record in found[0].records


@given(available())
def test_every_available_state_is_a_candidate_or_rejected(found):
    candidates, rejected = order_candidates(found)
    seen = {(c.step, c.is_stored) for c in candidates} | {(r.step, r.is_stored) for r in rejected}
    for of_rank in found:
        assert of_rank.snapshot_step is None or (of_rank.snapshot_step, MEMORY) in seen
        assert all((each.step, STORED) in seen for each in of_rank.records)
        assert all((each.step, STORED) in seen for each in of_rank.damaged)


def test_snapshots_that_differ_are_refused_by_name_and_storage_is_used():
    found = [
        AvailableStates(snapshot_step=9, snapshot_checksum="a", records=(record(5),)),
        AvailableStates(snapshot_step=9, snapshot_checksum="b"),
        AvailableStates(snapshot_step=9, snapshot_checksum="a"),
    ]
    candidates, rejected = order_candidates(found)
    assert [(c.step, c.is_stored) for c in candidates] == [(5, STORED)]
    assert [(r.step, r.is_stored) for r in rejected] == [(9, MEMORY)]
    assert "0, 2 | 1" in rejected[0].reason


def test_the_only_state_is_tried_again_however_often_it_failed():
    """Skipping it would start the run from the seed, silently."""
    candidates, rejected = order_candidates(
        [AvailableStates(failures=99, snapshot_step=3, snapshot_checksum="a")]
    )
    assert [c.step for c in candidates] == [3]
    assert not rejected
