"""Attacks on a restore: ranks whose agents count differently, and states that load half-way."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from committed import commit_state
from elastic.train.state.local_snapshots import LocalSnapshots
from payloads import hashes_of
from torch import nn

from elastic.checkpoint.catalog import verify
from elastic.checkpoint.commit import WriteLimits, commit
from elastic.checkpoint.record import Save, commit_name
from elastic.errors import NothingLoads, StateDoesNotFit, StoreFailed
from elastic.proof.consistency import Comparison
from elastic.snapshot import image
from elastic.snapshot.slots import SnapshotInfo, SnapshotSlots
from elastic.storage.store import Payload, StoreRefused, StoreUnavailable
from elastic.testing.fakes import FakeClock, FakeStore
from elastic.testing.ranks import Member
from elastic.train.groups import ProcessGroups
from elastic.train.state.candidates import RESTORES_OF_ONE_STATE
from elastic.train.state.restore import Restorer
from elastic.train.state.state import State
from elastic.uploader.state_check import check_state

ALONE = Member(rank=0, world_size=1, group=None)


def model(value):
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def memory_with(state, step):
    """The memory of a node that has a snapshot of this state."""
    flat = state.flatten()
    laid_out = image.layout(flat.tensors, flat.to_json() | {"chain": "chain"})
    slots = SnapshotSlots.create(laid_out.size_bytes, 1)
    slot = slots.begin()
    checksum = image.copy_into(laid_out, slots.body(slot))
    info = SnapshotInfo(
        step=step, epoch=0, generation=1, world_size=1, torch=torch.__version__, checksum=checksum
    )
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
        failures=failures,
        divergence=None,
        log=None,
        clock=FakeClock(),
        faults=None,
        committed_step=committed_step,
    )


def restored(member, step_of_rank, failures_of_rank):
    """The step that this rank resumes from, and the weight that it then has: the step's number."""
    step, failures = step_of_rank[member.rank], failures_of_rank[member.rank]
    slots = memory_with(State(model=model(float(step))), step)
    mine = model(0.0)
    found = restorer(slots, member, failures).restore(State(model=mine))
    return [found.step, mine.weight[0, 0].item(), found.doubt]


@pytest.mark.parametrize("failures", [[0, RESTORES_OF_ONE_STATE + 1], [RESTORES_OF_ONE_STATE + 1, 0]])
def test_ranks_whose_agents_counted_different_failures_restore_one_state(ranks, failures):
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


def test_a_snapshot_that_loads_half_way_never_starts_the_run_over():
    """The model has the weights of step 3 when the next object refuses: step 1 must not follow."""
    slots = memory_with(State(model=model(3.0), other=LoadsNothing()), 3)
    state = State(model=(changed := model(0.0)), other=LoadsNothing())

    with pytest.raises(StateDoesNotFit, match=r"snapshot of step 3 does not fit .* it is of another version"):
        restorer(slots).restore(state)
    assert changed.weight[0, 0].item() == 3.0
    assert [each.info.step for each in slots.whole()] == [3]


def test_a_snapshot_whose_bytes_changed_never_starts_the_run_over():
    """It is the only state that there is: nothing was saved yet."""
    slots = memory_with(State(model=model(3.0)), 3)
    newest = slots.newest()
    slots.body(newest.slot)[newest.size_bytes - 1] ^= 1
    reason = "1 of 1 ranks have snapshots.* snapshot step=3: its bytes changed in memory"
    with pytest.raises(NothingLoads, match=reason):
        restorer(slots).restore(State(model=model(0.0)))


def is_refused_where_snapshots_differ(member):
    slots = memory_with(State(model=model(float(member.rank))), 3)
    reason = r"(?s)2 of 2 ranks have snapshots.*snapshot step=3: the nodes' snapshots of it differ"
    with pytest.raises(NothingLoads, match=reason):
        restorer(slots, member).restore(State(model=model(0.0)))
    return True


def test_snapshots_that_differ_never_start_the_run_over(ranks):
    assert ranks.run(2, is_refused_where_snapshots_differ) == [True] * 2


def test_without_any_state_the_run_starts():
    found = restorer(None).restore(State(model=model(0.0)))
    assert (found.step, found.source) == (0, "none")


def store_with(*steps, digest=None):
    """Checkpoints of these steps; a state is of weights with its step's number.

    digest: that the records claim.
    """
    store, clock = FakeStore(), FakeClock()
    for step in steps:
        slots = memory_with(State(model=model(float(step))), step)
        newest = slots.newest()
        commit(
            store,
            Payload(fd=slots.fd, offset=newest.offset, size_bytes=newest.size_bytes),
            Save(
                run_id="run",
                step=step,
                epoch=0,
                generation=1,
                world_size=1,
                torch=torch.__version__,
            ),
            limits=WriteLimits(deadline=clock.monotonic() + 100.0, is_fenced=lambda: False),
            clock=clock,
            reached=lambda _point: None,
            hashed=partial(_hashes, slots, digest),
            check=check_state,
        )
    return store


def _hashes(slots, digest):
    newest = slots.newest()
    found = hashes_of(slots.body(newest.slot)[: newest.size_bytes])
    return replace(found, digest=digest or found.digest)


def fails_until(store, moment_s, clock, *, error=StoreUnavailable):
    """From the listing on, the payload of step 9 is not given before this moment."""

    def before(verb, name):
        if verb == "read" and name.endswith("state.safetensors") and "9/" in name and clock.now < moment_s:
            raise error("the storage is away")

    store.before = before


def test_an_outage_between_listing_and_payload_loses_no_checkpoint():
    """The storage is away for half a minute, ten times as long as one read is tried."""
    store = store_with(8, 9)
    restoring = restorer(None, store=store)
    fails_until(store, restoring.clock.now + 30.0, restoring.clock)
    found = restoring.restore(State(model=(loaded := model(0.0))))
    assert (found.step, found.source, loaded.weight[0, 0].item()) == (9, "checkpoint", 9.0)


def replaces_at(store, place, *, times=1):
    """When something is read whose name ends with `place`, its step was deleted for a newer one."""
    left = list(range(10, 10 + times))

    def before(verb, name):
        if verb == "read" and name.endswith(place) and left:
            newer = store_with(left.pop(0)).objects
            store.objects.clear()
            store.objects.update(newer)

    store.before = before


@pytest.mark.parametrize("place", ["COMMIT.json", "state.safetensors"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_checkpoint_that_was_deleted_after_the_listing_makes_way_for_a_newer_one(place, times):
    """Only one is kept, and another node's uploader commits and deletes while this one restores."""
    store = store_with(9)
    replaces_at(store, place, times=times)
    found = restorer(None, store=store).restore(State(model=(loaded := model(0.0))))
    assert (found.step, found.source) == (9 + times, "checkpoint")
    assert loaded.weight[0, 0].item() == 9 + times


def test_records_that_are_listed_and_gone_are_not_an_empty_store():
    """The store's listings lag behind: the run must not start over."""
    store = store_with(9)
    listing = store.list()
    store.objects.clear()
    store.list = lambda: listing
    with pytest.raises(StoreFailed, match="1 commit records were listed and cannot be found"):
        restorer(None, store=store).restore(State(model=model(0.0)))


def test_a_checkpoint_that_the_group_knows_is_found_without_the_listing():
    """The listing is old, and shows the one before it alone."""
    store = store_with(8, 9)
    listing = [each for each in store.list() if "8/" in each.name]
    store.list = lambda: listing
    found = restorer(None, store=store, committed_step=9).restore(State(model=model(0.0)))
    assert (found.step, found.source) == (9, "checkpoint")


def test_a_damaged_record_that_an_old_listing_hides_is_refused_like_any_other():
    """The group knows step 9, whose record is torn: step 8 is used, as if both were listed."""
    store = store_with(8, 9)
    listing = [each for each in store.list() if "8/" in each.name]
    store.list = lambda: listing
    (record,) = (name for name in store.objects if "9/" in name and name.endswith("COMMIT.json"))
    store.objects[record] = b"{"
    found = restorer(None, store=store, committed_step=9).restore(State(model=model(0.0)))
    assert (found.step, found.source) == (8, "checkpoint")


def copy_of_another_run(store, step):
    """A person has copied a checkpoint of another run into the folder."""
    commit_state(store, "other", step, State(model=model(7.0)))


def test_a_checkpoint_of_another_run_hides_no_missing_one():
    """The group knows step 9, the run directory is an old copy, and something newer lies in it."""
    store = store_with(8)
    copy_of_another_run(store, 5000)
    with pytest.raises(NothingLoads, match="the group has committed step 9"):
        restorer(None, store=store, committed_step=9).restore(State(model=model(0.5)))


def test_a_record_that_another_runs_took_the_place_of_is_damaged_and_not_missing():
    """As a torn one: it is reported, and the older one is used."""
    store = store_with(8, 9)
    copied = FakeStore()
    copy_of_another_run(copied, 9)
    store.objects |= copied.objects
    restoring = restorer(None, store=store, committed_step=9)
    assert restoring.restore(State(model=model(0.0))).step == 8


@pytest.mark.parametrize("hidden_by", ["another run", "damage"])
def test_a_checkpoint_that_an_old_listing_hides_is_found_by_name(hidden_by):
    """A newer checkpoint of another run is listed; or the first record of step 9 is torn, and a
    second one has taken its place.
    """
    store = store_with(8, 9)
    if hidden_by == "another run":
        copy_of_another_run(store, 5000)
    else:
        store.objects[commit_name(9, 1)] = store.objects[commit_name(9)]
        store.objects[commit_name(9)] = b"{"
    listing = [each for each in store.list() if not each.name.startswith("000000000009")]
    store.list = lambda: listing
    found = restorer(None, store=store, committed_step=9).restore(State(model=model(0.0)))
    assert (found.step, found.source) == (9, "checkpoint")


@pytest.mark.parametrize("steps", [(), (8,)])
def test_training_never_goes_on_from_before_a_checkpoint_that_is_missing(steps):
    """Neither from the seed nor from an older checkpoint; the objects stay as they were built."""
    with pytest.raises(NothingLoads, match="the group has committed step 9"):
        restorer(None, store=store_with(*steps), committed_step=9).restore(State(model=(built := model(0.5))))
    assert built.weight[0, 0].item() == 0.5


@pytest.mark.parametrize("error", [StoreUnavailable, StoreRefused])
@pytest.mark.parametrize("steps", [(9,), (8, 9)])
def test_what_the_storage_does_not_give_is_not_taken_for_damage(steps, error):
    """It stays away, or refuses: no older state is loaded, and --fresh is not advised."""
    store = store_with(*steps)
    restoring = restorer(None, store=store)
    fails_until(store, float("inf"), restoring.clock, error=error)
    state = State(model=(untouched := model(0.0)))
    with pytest.raises(
        StoreFailed, match="the checkpoint of step 9 is committed and cannot be read"
    ) as raised:
        restoring.restore(state)
    assert "--fresh" not in str(raised.value)
    assert (raised.value.exit_code, untouched.weight[0, 0].item()) == (1, 0.0)


OTHERS = {
    "another entry": (lambda: {"model": model(0.0), "ema": model(0.0)}, "has ema, model"),
    "another shape": (
        lambda: {"model": nn.Linear(3, 1, bias=False)},
        "model does not take it: .*size mismatch for weight",
    ),
    "another dtype": (
        lambda: {"model": model(0.0).double()},
        r"model\.weight: saved torch.float32 .* now torch.float64",
    ),
}


@pytest.mark.parametrize("objects", OTHERS)
def test_a_whole_state_of_other_objects_ends_the_restore_with_the_reason(objects):
    """An edited recipe. The older checkpoint is not tried: its payload is gone, and nothing says
    so. No damage is spoken of, and the way on is named.
    """
    store = store_with(8, 9)
    (older,) = (name for name in store.objects if name.endswith("state.safetensors") and "008/" in name)
    del store.objects[older]
    make, words = OTHERS[objects]
    with pytest.raises(
        StateDoesNotFit, match=f"the checkpoint of step 9 does not fit what the recipe builds: .*{words}"
    ) as raised:
        restorer(None, store=store).restore(State(**make()))
    text = str(raised.value)
    assert "elastic-train RECIPE --from runs/a:NAME --run-dir NEW" in text and "\n" not in text
    assert raised.value.exit_code == 76
    assert "verify" not in text and "008" not in text and "step=8" not in text


def optimized(make):
    """Two layers, and an optimizer that is made of their weights."""
    layers = nn.ModuleDict({"a": model(1.0), "b": model(2.0)})
    state = State(model=layers, optimizer=make([layers[name].weight for name in "ab"]))
    state.begin()
    return state


SGD = partial(torch.optim.SGD, lr=0.1)
OTHER_OPTIMIZERS = {
    "reversed": (
        lambda weights: SGD(weights[::-1]),
        r"has model\.b\.weight in place 0, where model\.a\.weight",
    ),
    "regrouped": (lambda weights: SGD([{"params": [each]} for each in weights]), r"groups of \[1, 1\]"),
    "frozen": (lambda weights: SGD(weights[:1]), r"groups of \[1\] parameters, and had groups of \[2\]"),
    "another class": (torch.optim.Adam, r"without \['amsgrad', "),
}


@pytest.mark.parametrize("kind", OTHER_OPTIMIZERS)
def test_another_optimizer_is_a_state_that_does_not_fit(kind):
    """Exit 76 for all, with which a newest state that is in memory alone is saved first."""
    make, words = OTHER_OPTIMIZERS[kind]
    with pytest.raises(
        StateDoesNotFit, match=f"the snapshot of step 3 does not fit what the recipe builds: .*{words}"
    ) as raised:
        restorer(memory_with(optimized(SGD), 3)).restore(optimized(make))
    assert raised.value.exit_code == 76
    assert len(str(raised.value)) < 420


def does_not_fit_one_rank(member):
    store = store_with(9)
    mine = model(0.0) if member.rank == 0 else nn.Linear(3, 1, bias=False)
    with pytest.raises(StateDoesNotFit, match="size mismatch"):
        restorer(None, member, store=store).restore(State(model=mine))
    return True


def test_a_state_that_does_not_fit_one_rank_ends_the_restore_on_all(ranks):
    assert ranks.run(2, does_not_fit_one_rank) == [True] * 2


def test_the_reason_of_each_refusal_is_told_in_order():
    """Newest first: a payload that is gone, one that was changed, one of another state."""
    store = store_with(7, digest="0" * 64)
    store.objects |= store_with(8, 9).objects
    for name, data in list(store.objects.items()):
        if name.endswith("state.safetensors") and "009/" in name:
            del store.objects[name]
        if name.endswith("state.safetensors") and "008/" in name:
            store.objects[name] = data[:-1] + bytes([data[-1] ^ 1])
    words = "3 checkpoints are committed .*step=9: .* is missing.*step=8: .* its bytes were changed.*step=7: .*digest 0000"
    with pytest.raises(NothingLoads, match=words) as raised:
        restorer(None, store=store).restore(State(model=model(0.0)))
    assert "elastic-train verify runs/a" in str(raised.value)
    damage = verify(store, FakeClock(), check_state)
    assert [each.step for each in damage] == [9, 8, 7]
    assert all(each.reason in str(raised.value) for each in damage)
