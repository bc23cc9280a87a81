"""Attacks on a restore: ranks whose agents count differently, states that load half-way, storage
that does not answer, and another run's state to begin from.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from committed import DATA, begin_run, commit_in, commit_state
from hypothesis import given
from hypothesis import strategies as st
from records import IDENTITY, LINK, RECORD
from saved_state import Holder
from steps import ALONE, groups_of
from torch import nn

from elastic.config import identity
from elastic.config.identity import Parent
from elastic.divergence import Divergence
from elastic.errors import ElasticError, NothingLoads, StateDoesNotFit, StoreFailed, UsageError
from elastic.proof.agreement import Comparison
from elastic.snapshot import image
from elastic.snapshot.slots import SnapshotInfo, SnapshotSlots
from elastic.storage.local import LocalStore
from elastic.storage.store import StoreRefused, StoreUnavailable
from elastic.system.untrusted import decode, encode
from elastic.testing.fakes import FakeClock, FakeStore
from elastic.train.state import candidates
from elastic.train.state.candidates import AvailableStates, Candidate, OfferedSnapshot, RejectedState
from elastic.train.state.restore import Restorer
from elastic.train.state.state import State


def model(value, width=2):
    module = nn.Linear(width, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def memory_with(state, step):
    """The memory of a node that has a snapshot of this state."""
    flat = state.flatten()
    laid_out = image.layout(flat.tensors, flat.to_json() | {"chain": "chain", "data": DATA})
    slots = SnapshotSlots.create(laid_out.size_bytes, 1)
    slot = slots.begin()
    checksum = image.copy_into(laid_out, slots.body(slot))
    info = SnapshotInfo(step=step, generation=1, checksum=checksum)
    published = slots.publish(slot, size_bytes=laid_out.size_bytes, info=info)
    slots.agree(slot, published.seq)
    return slots


def store_with(*steps):
    """Checkpoints of these steps; a state is of weights with its step's number."""
    store = FakeStore()
    for step in steps:
        commit_state(store, "run", step, State(model=model(float(step))))
    return store


def restorer(state, member=ALONE, *, slots=None, store=None, parent=None, own=None, **link):
    """Without a store, there is no checkpoint. own: the folder of the run's own directory."""
    groups = groups_of(member)
    parts = SimpleNamespace(
        state=state,
        groups=groups,
        store=None if own is None else LocalStore(Path(own)),
        checkpoints=FakeStore() if store is None else store,
        comparison=Comparison(groups=groups, node="a", generation=1, log=None),
        identity=SimpleNamespace(run_id="run", parent=parent),
        run_dir=SimpleNamespace(url="runs/a"),
        link=replace(LINK, memory="" if slots is None else slots.path, **link),
        output=None,
        clock=FakeClock(),
        faults=None,
    )
    return Restorer(parts)


def loaded(**how):
    """The step, the source, and the weight that the model then has."""
    return found_by(restorer(State(model=(mine := model(0.0))), **how), mine)


def found_by(restoring, mine):
    found = restoring.restore()
    return [found.step, found.source, mine.weight[0, 0].item()]


def flip(slots):
    newest = slots.whole()[0]
    slots.body(newest.slot)[newest.size_bytes - 1] ^= 1


# The memory of nodes.


def restored(member, step, value, damaged, width):
    """Each argument has one value for each rank. A step of 0: its node has no snapshot."""
    rank, slots = member.rank, None
    if step[rank]:
        slots = memory_with(State(model=model(value[rank])), step[rank])
    if damaged[rank]:
        flip(slots)
    mine, store = model(0.0, width[rank]), store_with(*[9] * (not any(step)))
    try:
        return found_by(restorer(State(model=mine), member, slots=slots, store=store), mine)
    except ElasticError as error:
        return [type(error).__name__, str(error)]


@pytest.mark.parametrize(
    ("differs", "expected"),
    [
        ({"damaged": [True, False]}, [3, "peer", 8.0]),
        # It is the only state that there is: nothing was saved yet.
        (
            {"damaged": [True, True]},
            ["NothingLoads", "none of them loads: snapshot step=3: its bytes changed"],
        ),
        ({"value": [0.0, 1.0]}, ["NothingLoads", "snapshot step=3: the nodes' snapshots of it differ"]),
        ({"width": [2, 3], "step": [0, 0]}, ["StateDoesNotFit", "size mismatch"]),
    ],
    ids=["damage", "damage alone", "another state", "misfit"],
)
def test_ranks_that_differ_restore_one_state_or_none(ranks, differs, expected):
    """A snapshot that one node has damaged comes from another's memory."""
    alike = {"step": [3, 3], "value": [8.0, 8.0], "damaged": [False] * 2, "width": [2, 2]}
    for found in ranks.run(2, restored, *(alike | differs).values()):
        assert found[:-1] == expected[:-1] and str(expected[-1]) in str(found[-1])


def test_a_snapshot_that_loads_half_way_starts_nothing_over():
    """The model has the weights of step 3 when the next object refuses: step 1 must not follow."""
    slots = memory_with(State(model=model(3.0), other=Holder({})), 3)
    refuses = Mock(side_effect=ValueError("it is of another version"))
    state = State(model=(changed := model(0.0)), other=Holder({}, refuses))
    with pytest.raises(StateDoesNotFit, match=r"snapshot of step 3 does not fit .* it is of another version"):
        restorer(state, slots=slots).restore()
    assert changed.weight[0, 0].item() == 3.0
    assert [each.info.step for each in slots.whole()] == [3]


# The storage.


def fails_until(restoring, moment_s, error=StoreUnavailable):
    """From the listing on, the payload of step 9 is not given before this moment."""

    def before(verb, name):
        if (
            verb == "read"
            and name.endswith("state.safetensors")
            and "9/" in name
            and restoring._parts.clock.now < moment_s
        ):
            raise error("the storage is away")

    restoring._parts.checkpoints.before = before


def test_an_outage_between_listing_and_payload_loses_nothing():
    """The storage is away for half a minute, ten times as long as one read is tried."""
    restoring = restorer(State(model=(mine := model(0.0))), store=store_with(8, 9))
    fails_until(restoring, restoring._parts.clock.now + 30.0)
    assert found_by(restoring, mine) == [9, "checkpoint", 9.0]


@pytest.mark.parametrize("error", [StoreUnavailable, StoreRefused])
def test_what_the_storage_does_not_give_is_not_taken_for_damage(error):
    """It stays away, or refuses: no older state is loaded, and --fresh is not advised."""
    restoring = restorer(State(model=(untouched := model(0.0))), store=store_with(8, 9))
    fails_until(restoring, float("inf"), error)
    with pytest.raises(StoreFailed, match="checkpoint of step 9 is committed and cannot be read") as raised:
        restoring.restore()
    assert "--fresh" not in str(raised.value)
    assert (raised.value.exit_code, untouched.weight[0, 0].item()) == (1, 0.0)


@pytest.mark.parametrize("place", ["COMMIT.json", "state.safetensors"])
def test_a_checkpoint_deleted_after_the_listing_yields_to_newer(place):
    """Only one is kept, and another node's uploader commits and deletes while this one restores:
    when something is read whose name ends with `place`, its step was deleted for a newer one.
    """
    store, left = store_with(9), [10, 11, 12]

    def before(verb, name):
        if verb == "read" and name.endswith(place) and left:
            newer = store_with(left.pop(0)).objects
            store.objects.clear()
            store.objects.update(newer)

    store.before = before
    assert loaded(store=store) == [12, "checkpoint", 12.0]


def test_records_that_are_listed_and_gone_are_not_an_empty_store():
    """The store's listings lag behind: the run must not start over."""
    store = store_with(9)
    listing = store.list()
    store.objects.clear()
    store.list = lambda: listing
    with pytest.raises(StoreFailed, match="1 commit records were listed and cannot be found"):
        loaded(store=store)


@pytest.mark.parametrize(("steps", "of_another_run"), [((), False), ((8,), False), ((8,), True)])
def test_nothing_before_a_missing_checkpoint_is_restored(steps, of_another_run):
    """Neither the seed nor an older checkpoint, nor where something newer of another run lies in
    the directory; the objects stay as they were built.
    """
    store = store_with(*steps)
    if of_another_run:
        commit_state(store, "other", 5000, State(model=model(7.0)))
    with pytest.raises(NothingLoads, match="the group has committed step 9"):
        restorer(State(model=(built := model(0.5))), store=store, committed_step=9).restore()
    assert built.weight[0, 0].item() == 0.5


# Another run's state, from which all ranks begin, or none.


@pytest.fixture
def parent(tmp_path):
    """The committed state of step 40 of a run in tmp_path/first, with the weight 40."""
    record = commit_in(begin_run(tmp_path / "first", IDENTITY), IDENTITY, 40, State(model=model(40.0)))
    return Parent(run_id=IDENTITY.run_id, url=str(tmp_path / "first"), step=40, digest=record.digest)


def begins(member, written, own, widths):
    """What a rank begins with, whose own model has this width; or why it does not, and whether the
    run directory is still claimed when it leaves.
    """
    parent, mine = decode(Parent, written, what="parent"), model(-1.0 - member.rank, widths[member.rank])
    try:
        found = restorer(State(model=mine), member, parent=parent, own=own).restore()
    except UsageError as error:
        return [str(error), Path(own, identity.NAME).exists()]
    return [found.step, found.source, found.chain, mine.weight[0, 0].item()]


@pytest.mark.parametrize("widths", [(3, 3), (2, 3)])
def test_where_one_rank_cannot_take_it_all_refuse(ranks, tmp_path, parent, widths):
    """On both ranks, or on the second alone: a rank that went on would wait for ever. The agent
    ends every rank when the first one has left, so that no rank leaves before the run directory is
    given back; else the corrected command would be refused.
    """
    own = begin_run(tmp_path / "own", IDENTITY)
    first, second = ranks.run(2, begins, encode(parent), str(own), widths)
    assert first == second and not first[1]
    assert "size mismatch for weight" in first[0]


def test_a_parent_that_is_gone_or_damaged_is_never_begun_from(tmp_path, parent):
    """After the command found it: its bytes are flipped, then its run is deleted."""
    (payload,) = (tmp_path / "first").glob("checkpoints/*/*/state.safetensors")
    payload.write_bytes(payload.read_bytes()[:-1] + b"!")
    untouched = model(0.0)

    def restore():
        restorer(State(model=untouched), parent=parent, own=tmp_path / "own").restore()

    with pytest.raises(UsageError, match=r"expected step 40 of .*, found it damaged: .*sha256"):
        restore()
    payload.with_name("COMMIT.json").unlink()
    with pytest.raises(UsageError, match=r"expected step 40 of .*, found that it is no longer there"):
        restore()
    assert untouched.weight[0, 0].item() == 0.0


# Attacks on the order in which states are tried at a restore.

STEPS = st.integers(1, 6)
MEMORY, STORED = False, True
CHECKSUMS = st.sampled_from(["a", "b"])


def record(step):
    return replace(RECORD, step=step)


def snapshot(step, checksum="a", generation=1):
    return OfferedSnapshot(step=step, checksum=checksum, generation=generation)


@st.composite
def available(draw):
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


def twin(found):
    """The dumb way: walk down from the highest step, memory before storage."""
    usable = []
    for step in range(10, 0, -1):
        checksums = {each.checksum for of_rank in found for each in of_rank.snapshots if each.step == step}
        usable += [(step, MEMORY)] * (len(checksums) == 1)
        usable += [(step, STORED) for c in found for r in c.records if r.step == step]
    return usable


@given(available())
def test_the_order_is_that_of_a_walk_down_the_steps(found):
    """Each candidate has the ranks that have it, and no state goes without a word."""
    ordered, rejected = candidates.order_candidates(found)
    assert [(c.step, c.is_stored) for c in ordered] == twin(found)
    for candidate in ordered:
        if candidate.record is None:
            steps = [[each.step for each in of_rank.snapshots] for of_rank in found]
            assert candidate.ranks == tuple(r for r, of_r in enumerate(steps) if candidate.step in of_r)
        else:
            assert candidate.ranks == (0,) and candidate.record in found[0].records
    seen = {(c.step, c.is_stored) for c in ordered} | {(r.step, r.is_stored) for r in rejected}
    for of_rank in found:
        assert all((each.step, MEMORY) in seen for each in of_rank.snapshots)
        assert all((each.step, STORED) in seen for each in (*of_rank.records, *of_rank.damaged))


@pytest.mark.parametrize(("again", "steps"), [(0, [9, 8, 5]), (9, [8, 9, 5]), (8, [9, 8, 5])])
def test_the_state_before_a_step_that_is_done_again_comes_first(again, steps):
    """If that step's own is the newest."""
    found = AvailableStates(snapshots=(snapshot(9), snapshot(8)), records=(record(5),))
    assert [each.step for each in candidates.order_candidates([found], again)[0]] == steps


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
    ordered, rejected = candidates.order_candidates(found)
    assert [c.step for c in ordered] == [8, 7]
    assert [(r.step, r.reason) for r in rejected] == [(9, "it was taken while the ranks' states differed")]


@pytest.mark.parametrize(
    ("there", "rejected", "is_missing"),
    [
        ([], [], True),
        ([(164, MEMORY)], [], True),
        ([(165, MEMORY)], [], False),
        ([(150, STORED)], [(165, STORED)], False),
        ([(150, STORED)], [(170, MEMORY)], True),
    ],
)
def test_an_older_state_needs_the_newest_commit_to_be_there(there, rejected, is_missing):
    """A damaged checkpoint is there; a damaged snapshot is no checkpoint."""
    found = [
        Candidate(step=step, holders=((0,),), record=record(step) if is_stored else None)
        for step, is_stored in there
    ]
    refused = [RejectedState(step=step, reason="torn", is_stored=is_stored) for step, is_stored in rejected]
    says = pytest.raises(NothingLoads, match=r"has committed step 165, and neither .* has that state")
    with says if is_missing else nullcontext():
        candidates.check_none_is_missing(165, found, refused, "runs/a")
