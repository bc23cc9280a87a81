"""Attacks on a restore: ranks whose agents count differently, and states that load half-way."""

from dataclasses import replace

import pytest
import torch
from committed import DATA, commit_state
from torch import nn

from elastic.checkpoint.record import commit_name
from elastic.config.environment import AgentLink
from elastic.errors import NothingLoads, StateDoesNotFit, StoreFailed
from elastic.proof.agreement import Comparison
from elastic.snapshot import image
from elastic.snapshot.slots import SnapshotInfo, SnapshotSlots
from elastic.storage.store import StoreRefused, StoreUnavailable
from elastic.testing.fakes import FakeClock, FakeStore
from elastic.testing.ranks import Member
from elastic.train.groups import ProcessGroups
from elastic.train.state.candidates import RESTORES_OF_ONE_STATE
from elastic.train.state.restore import LocalSnapshots, Restorer
from elastic.train.state.state import State

ALONE = Member(rank=0, world_size=1, group=None)
LINK = AgentLink(pid=1, node="a", run_dir="runs/a", generation=1, control_page="", uploader="")


def model(value):
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def memory_with(state, step, data=DATA):
    """The memory of a node that has a snapshot of this state."""
    flat = state.flatten()
    laid_out = image.layout(flat.tensors, flat.to_json() | {"chain": "chain", "data": data})
    slots = SnapshotSlots.create(laid_out.size_bytes, 1)
    slot = slots.begin()
    checksum = image.copy_into(laid_out, slots.body(slot))
    info = SnapshotInfo(step=step, epoch=0, generation=1, world_size=1, torch="2", checksum=checksum)
    published = slots.publish(slot, size_bytes=laid_out.size_bytes, info=info)
    slots.agree(slot, published.seq)
    return slots


def restorer(slots, member=ALONE, failures=0, store=None, committed_step=0):
    """Without a store, there is no checkpoint."""
    groups = ProcessGroups(
        rank=member.rank,
        world_size=member.world_size,
        local_rank=0,
        device=torch.device("cpu"),
        control=member.group,
    )
    return Restorer(
        groups=groups,
        store=FakeStore() if store is None else store,
        local=LocalSnapshots(None if slots is None else SnapshotSlots.open(slots.path)),
        comparison=Comparison(groups=groups, node="a", generation=1, log=None),
        run_id="run",
        run_url="runs/a",
        link=replace(LINK, failures=failures, committed_step=committed_step),
        log=None,
        clock=FakeClock(),
        faults=None,
    )


def restored(member, step_of_rank, failures_of_rank):
    """The step that this rank resumes from, and the weight that it then has: the step's number."""
    step, failures = step_of_rank[member.rank], failures_of_rank[member.rank]
    slots = memory_with(State(model=model(float(step))), step)
    mine = model(0.0)
    found = restorer(slots, member, failures).restore(State(model=mine))
    return [found.step, mine.weight[0, 0].item(), found.doubt]


@pytest.mark.parametrize("failures", [[0, RESTORES_OF_ONE_STATE + 1], [RESTORES_OF_ONE_STATE + 1, 0]])
def test_ranks_with_different_failure_counts_restore_one_state(ranks, failures):
    """The node that just joined counts 0. Its snapshot is the newest, or it is another node's. What
    was trained before the state that is given up is in doubt.
    """
    doubt = f"step 9 was given up: it was restored {RESTORES_OF_ONE_STATE} times and no new step followed"
    assert ranks.run(2, restored, [9, 8], failures) == [[8, 8.0, doubt]] * 2


class LoadsNothing:
    """An object of the recipe that refuses the state that it gave."""

    def state_dict(self):
        return {}

    def load_state_dict(self, _state):
        raise ValueError("it is of another version")


def test_a_snapshot_that_loads_half_way_starts_nothing_over():
    """The model has the weights of step 3 when the next object refuses: step 1 must not follow."""
    slots = memory_with(State(model=model(3.0), other=LoadsNothing()), 3)
    state = State(model=(changed := model(0.0)), other=LoadsNothing())

    with pytest.raises(StateDoesNotFit, match=r"snapshot of step 3 does not fit .* it is of another version"):
        restorer(slots).restore(state)
    assert changed.weight[0, 0].item() == 3.0
    assert [each.info.step for each in slots.whole()] == [3]


def flip(slots):
    newest = slots.newest()
    slots.body(newest.slot)[newest.size_bytes - 1] ^= 1


def test_a_snapshot_whose_bytes_changed_starts_nothing_over():
    """It is the only state that there is: nothing was saved yet."""
    flip(slots := memory_with(State(model=model(3.0)), 3))
    with pytest.raises(
        NothingLoads, match="none of them loads: snapshot step=3: its bytes changed in memory"
    ):
        restorer(slots).restore(State(model=model(0.0)))


def restored_where_one_is_damaged(member):
    slots = memory_with(State(model=model(3.0)), 3)
    if member.rank == 0:
        flip(slots)
    found = restorer(slots, member).restore(State(model=(mine := model(0.0))))
    return [found.step, found.source, mine.weight[0, 0].item()]


def test_a_snapshot_damaged_on_one_node_comes_from_another(ranks):
    assert ranks.run(2, restored_where_one_is_damaged) == [[3, "peer", 3.0]] * 2


def is_refused_where_snapshots_differ(member):
    slots = memory_with(State(model=model(float(member.rank))), 3)
    with pytest.raises(NothingLoads, match="snapshot step=3: the nodes' snapshots of it differ"):
        restorer(slots, member).restore(State(model=model(0.0)))
    return True


def test_snapshots_that_differ_never_start_the_run_over(ranks):
    assert ranks.run(2, is_refused_where_snapshots_differ) == [True] * 2


def store_with(*steps):
    """Checkpoints of these steps; a state is of weights with its step's number."""
    store = FakeStore()
    for step in steps:
        commit_state(store, "run", step, State(model=model(float(step))))
    return store


def fails_until(store, moment_s, clock, *, error=StoreUnavailable):
    """From the listing on, the payload of step 9 is not given before this moment."""

    def before(verb, name):
        if verb == "read" and name.endswith("state.safetensors") and "9/" in name and clock.now < moment_s:
            raise error("the storage is away")

    store.before = before


def test_an_outage_between_listing_and_payload_loses_nothing():
    """The storage is away for half a minute, ten times as long as one read is tried."""
    store = store_with(8, 9)
    restoring = restorer(None, store=store)
    fails_until(store, restoring.clock.now + 30.0, restoring.clock)
    found = restoring.restore(State(model=(loaded := model(0.0))))
    assert (found.step, found.source, loaded.weight[0, 0].item()) == (9, "checkpoint", 9.0)


def replaces_at(store, place, *, times):
    """When something is read whose name ends with `place`, its step was deleted for a newer one."""
    left = list(range(10, 10 + times))

    def before(verb, name):
        if verb == "read" and name.endswith(place) and left:
            newer = store_with(left.pop(0)).objects
            store.objects.clear()
            store.objects.update(newer)

    store.before = before


@pytest.mark.parametrize("place", ["COMMIT.json", "state.safetensors"])
def test_a_checkpoint_deleted_after_the_listing_yields_to_newer(place):
    """Only one is kept, and another node's uploader commits and deletes while this one restores."""
    store = store_with(9)
    replaces_at(store, place, times=3)
    found = restorer(None, store=store).restore(State(model=(loaded := model(0.0))))
    assert (found.step, found.source, loaded.weight[0, 0].item()) == (12, "checkpoint", 12.0)


def test_records_that_are_listed_and_gone_are_not_an_empty_store():
    """The store's listings lag behind: the run must not start over."""
    store = store_with(9)
    listing = store.list()
    store.objects.clear()
    store.list = lambda: listing
    with pytest.raises(StoreFailed, match="1 commit records were listed and cannot be found"):
        restorer(None, store=store).restore(State(model=model(0.0)))


@pytest.mark.parametrize("hides", ["step 9", "the second record of step 9", "a torn record"])
def test_a_checkpoint_known_to_the_group_needs_no_listing(hides):
    """The listing is old, and shows the one before it alone. A damaged record is refused as if it
    was listed; a first record that is torn may have a second one in its place.
    """
    store = store_with(8, 9)
    listing = [each for each in store.list() if "8/" in each.name]
    store.list = lambda: listing
    if "second" in hides:
        store.objects[commit_name(9, 1)] = store.objects[commit_name(9)]
    if hides != "step 9":
        store.objects[commit_name(9)] = b"{"
    found = restorer(None, store=store, committed_step=9).restore(State(model=model(0.0)))
    assert (found.step, found.source) == (8 if "torn" in hides else 9, "checkpoint")


@pytest.mark.parametrize(("steps", "of_another_run"), [((), False), ((8,), False), ((8,), True)])
def test_nothing_before_a_missing_checkpoint_is_restored(steps, of_another_run):
    """Neither the seed nor an older checkpoint, nor where something newer of another run lies in
    the directory; the objects stay as they were built.
    """
    store = store_with(*steps)
    if of_another_run:
        commit_state(store, "other", 5000, State(model=model(7.0)))
    with pytest.raises(NothingLoads, match="the group has committed step 9"):
        restorer(None, store=store, committed_step=9).restore(State(model=(built := model(0.5))))
    assert built.weight[0, 0].item() == 0.5


@pytest.mark.parametrize("error", [StoreUnavailable, StoreRefused])
def test_what_the_storage_does_not_give_is_not_taken_for_damage(error):
    """It stays away, or refuses: no older state is loaded, and --fresh is not advised."""
    store = store_with(8, 9)
    restoring = restorer(None, store=store)
    fails_until(store, float("inf"), restoring.clock, error=error)
    state = State(model=(untouched := model(0.0)))
    with pytest.raises(
        StoreFailed, match="the checkpoint of step 9 is committed and cannot be read"
    ) as raised:
        restoring.restore(state)
    assert "--fresh" not in str(raised.value)
    assert (raised.value.exit_code, untouched.weight[0, 0].item()) == (1, 0.0)


def test_a_state_of_other_objects_ends_the_restore():
    """An edited recipe. The older checkpoint is not tried: its payload is gone, and nothing says
    so. No damage is spoken of, and the way on is named.
    """
    store = store_with(8, 9)
    (older,) = (name for name in store.objects if name.endswith("state.safetensors") and "008/" in name)
    del store.objects[older]
    words = "the checkpoint of step 9 does not fit what the recipe builds: .*size mismatch for weight"
    with pytest.raises(StateDoesNotFit, match=words) as raised:
        restorer(None, store=store).restore(State(model=nn.Linear(3, 1, bias=False)))
    text = str(raised.value)
    assert "--from runs/a:NAME --run-dir NEW" in text and "\n" not in text
    assert raised.value.exit_code == 76
    assert "verify" not in text and "step=8" not in text


def does_not_fit_one_rank(member):
    store = store_with(9)
    mine = model(0.0) if member.rank == 0 else nn.Linear(3, 1, bias=False)
    with pytest.raises(StateDoesNotFit, match="size mismatch"):
        restorer(None, member, store=store).restore(State(model=mine))
    return True


def test_a_misfit_on_one_rank_ends_the_restore_on_all(ranks):
    assert ranks.run(2, does_not_fit_one_rank) == [True] * 2
