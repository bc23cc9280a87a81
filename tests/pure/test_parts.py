"""A state in parts is the whole state, wherever its parts are, and half of one is none."""

import re
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from payloads import hashes_of, in_memory_file
from saved_state import any_tensors
from steps import groups_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elastic.checkpoint import commit_parts
from elastic.checkpoint.catalog import list_commits, verify
from elastic.checkpoint.commit import WriteLimits
from elastic.checkpoint.commit_parts import OfferedPart, PartsCommit
from elastic.checkpoint.payload_check import check_state, digest_of
from elastic.checkpoint.prune import prune
from elastic.checkpoint.record import Save, parse
from elastic.errors import CheckpointDamaged, StoreFailed
from elastic.snapshot import image, safetensors_header
from elastic.snapshot.division import CUT, joined
from elastic.snapshot.image_hash import in_memory
from elastic.storage.store import StoreUnavailable
from elastic.testing.fakes import FakeClock, FakeStore
from elastic.train.sharded.modules import ShardedModules
from elastic.train.sharded.regroup import regroup
from elastic.train.sharded.snapshots import places_of, starts_of
from elastic.train.state.flat import FlatState
from elastic.train.state.state import State


def image_of(tensors, document):
    layout = image.layout(tensors, document)
    body = bytearray(layout.size_bytes)
    image.copy_into(layout, body)
    return body


def whole(tensors, **about):
    return image_of(tensors, {"state": {"m": {}}, "about": about, "chain": "c", "data": ""})


def cut(tensors, sharded, of):
    """The images of the parts, as a dumb twin cuts them. No tensor is tied."""
    uncut = [name for name in tensors if name not in sharded]
    division = {
        "of": of,
        "dtypes": {name: image.DTYPES[each.dtype] for name, each in tensors.items()},
        "shapes": {name: list(each.shape) for name, each in tensors.items()},
        "owners": {name: at % of for at, name in enumerate(uncut)},
        "ties": {},
    }
    parts = []
    for number in range(of):
        own = {name: each for name, each in tensors.items() if division["owners"].get(name) == number}
        for name in sharded:
            rows = -(-len(tensors[name]) // of)
            own[name] = tensors[name][number * rows : (number + 1) * rows]
        about = {CUT: division | {"number": number}, "sharded": sorted(sharded)}
        parts.append(whole(dict(sorted(own.items())), **about))
    return parts


@st.composite
def states(draw):
    tensors, sharded = {}, []
    for number in range(draw(st.integers(0, 6))):
        name = f"m.{number}"
        tensors[name] = draw(any_tensors(7))
        if tensors[name].dim() and draw(st.booleans()):
            sharded.append(name)
    return tensors, sharded, draw(st.integers(1, 5))


@given(states(), st.randoms(use_true_random=False))
def test_parts_join_to_the_image_of_the_whole(state, random):
    tensors, sharded, of = state
    parts, expected = cut(tensors, sharded, of), bytes(whole(tensors, sharded=sorted(sharded)))
    found = joined([safetensors_header.parse(each) for each in parts])
    assert found.size_bytes == len(expected)
    source = found.source([in_memory(each) for each in parts])
    start, end = sorted(random.randint(0, len(expected)) for _ in range(2))
    for begin, until in ((0, len(expected)), (start, end)):
        assert b"".join(bytes(each) for each in source(begin, until)) == expected[begin:until]
    placed = bytearray(found.head.ljust(len(expected), b"\0"))
    for number, part in enumerate(parts):
        for there, size_bytes, here in found.places(number):
            placed[here : here + size_bytes] = part[there : there + size_bytes]
    assert placed == expected


class Summing(ShardedModules):
    """The sums of numbers over ranks alone."""

    def __init__(self, groups):
        self._groups = groups


def regrouped(member, of, is_sharded, is_whole):
    """Whether each rank gets its rows of what other ranks held, in `of` parts or as a whole."""
    groups = groups_of(member)
    torch.manual_seed(member.rank)  # a load changes the model
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    if is_sharded:
        fully_shard(model, mesh=DeviceMesh.from_group(member.group, "cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[model[1].bias]["own"] = torch.ones(7)  # whole, of a sharded parameter's shape
    state = State(model=model, optimizer=optimizer)
    state.sharded = Summing(groups) if is_sharded else None
    flat = state.flatten()
    torch.manual_seed(9)
    tensors = {name: torch.rand(each.shape).to(each.dtype) for name, each in flat.tensors.items()}
    sharded = [
        name for name in tensors if name.startswith("model.") and "num" not in name and "run" not in name
    ]
    sharded += [name for name in tensors if "exp_avg" in name]
    flat.about["alignments"] = {"optimizer.state.0.exp_avg": 4}
    document = {"state": flat.document, "about": flat.about}
    if is_whole:
        parts = [image_of(tensors, document)]
    else:
        parts = []
        for part in cut(tensors, sharded, of):
            own, found = image.read(part)
            about = flat.about | found["about"]
            parts.append(image_of(own, document | {"about": about}))
    holders = [number % groups.world_size for number in range(len(parts))]
    load = [*map(memoryview, parts)].__getitem__
    got = FlatState.read(*regroup(groups, state, holders, load))
    expected = dict(tensors)
    if is_sharded:
        for name in sharded:
            rows = -(-len(tensors[name]) // groups.world_size)
            expected[name] = tensors[name][member.rank * rows : (member.rank + 1) * rows]
    own = got.own().tensors
    are_rows = [name for name, each in expected.items() if not torch.equal(own[name], each)]
    state.load(got)
    evidence = state.evidence().whole if is_sharded else ""
    twin = image.read(cut(tensors, sharded, groups.world_size)[member.rank])[0]
    part = state.flatten().part(member.rank, groups.world_size).tensors if is_sharded else twin
    return [are_rows, [name for name in twin if not torch.equal(part[name], twin[name])], evidence]


@pytest.mark.parametrize("is_whole", [False, True])
def test_each_rank_gets_its_rows_of_any_division(ranks, is_whole):
    evidence = set()
    for world_size, of, is_sharded in ((2, 3, True), (3, 2, True), (5, 1, True), (2, 3, False)):
        for found in ranks.run(world_size, regrouped, of, is_sharded, is_whole):
            assert found[:2] == [[], []]
            evidence.add(found[2])
    assert len(evidence - {""}) == 1  # at every world size


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 2))
def test_any_one_node_may_go_where_there_are_copies(sizes, copies):
    ranks, nodes = count(), []
    for size in sizes:
        nodes += [[next(ranks) for _ in range(size)]]
    places = places_of(nodes, copies)
    world_size = sum(sizes)
    for lost in nodes:
        left = {each.number for each in places if each.leader not in lost}
        if copies == 2 and len(nodes) > 1:
            assert left == set(range(world_size))
    for node in nodes:
        found = starts_of(places, node[0], [4096 * (1 + rank) - 5 for rank in range(world_size)])
        assert {place.writer for place, _ in found} <= set(node)
        ends = [at + 4096 * (1 + place.number) for place, at in found]
        assert [at for _, at in found] == [0, *ends[:-1]]


PARTS = cut({f"m.{number}": torch.arange(9.0) + number for number in range(4)}, ["m.0", "m.3"], 3)


def commit(store, *, own, copies=(), has_digest=False, step=7, checksum="c" * 64):
    """As the uploader of one of the nodes, with time that waits for nobody."""
    clock = FakeClock()
    limits = WriteLimits(deadline=clock.monotonic() + 100.0, is_fenced=lambda: False)
    state = {"of": len(PARTS), "checksum": checksum, "has_digest": has_digest}
    write = {"limits": limits, "clock": clock, "reached": lambda _: None}
    parts_commit = PartsCommit(store=store, save=Save(run_id="r", step=step, generation=1), **state, **write)
    offered = []
    with in_memory_file(b"".join(PARTS)) as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_parts, "COPIES_S", 0.0)
        patch.setattr(commit_parts, "OTHERS_S", 0.0)
        for number in (*own, *copies):
            at, size_bytes = sum(map(len, PARTS[:number])), len(PARTS[number])
            payload = type(file)(fd=file.fd, offset=at, size_bytes=size_bytes)
            part = {"number": number, "payload": payload, "is_copy": number in copies}
            offered.append(OfferedPart(**part, hashes=partial(hashes_of, PARTS[number])))
        return parts_commit.commit(offered)


def tried(store, **save):
    with suppress(StoreFailed):
        commit(store, **save)


def test_the_node_of_the_last_part_makes_the_checkpoint():
    store = FakeStore()
    with pytest.raises(StoreFailed, match="the parts of ranks 1, 2 were not stored"):
        commit(store, own=[0])
    assert list_commits(store, FakeClock())[0] == []
    done = commit(store, own=[1], copies=[2])  # its node is dead, and this one has a copy
    assert done.is_ours
    assert not commit(store, own=[0]).is_ours
    assert verify(store, FakeClock()) == []
    assert done.record.digest == "" and done.record.size_bytes == sum(map(len, PARTS))
    again = commit(store, own=[0, 1, 2], has_digest=True)
    assert again.is_ours and again.record.digest == digest_of(store, done.record, FakeClock())
    other = commit(store, own=[0, 1, 2], checksum="d" * 64)
    assert not other.is_ours and "with another state" in other.difference
    tried(late := FakeStore(), own=[0], has_digest=True)  # and goes away before it has made the digest
    assert commit(late, own=[1], copies=[2], has_digest=True).record.digest == again.record.digest
    kept = bytearray()

    def keeps(header):
        kept.extend(bytes(header.entries["m.3"].end))
        return lambda at, piece: kept.__setitem__(slice(at, at + len(piece)), piece)

    check_state(store, done.record, FakeClock(), keeps)
    assert torch.equal(torch.frombuffer(kept[-36:], dtype=torch.float32), torch.arange(9.0) + 3)


@given(st.integers(0, 60), st.sampled_from([(SystemExit, 1), (StoreFailed, 1), (StoreUnavailable, 6)]))
def test_a_crash_anywhere_leaves_a_whole_checkpoint_or_none(operation, fault):
    """Or an outage that outlasts what a call waits. And the next try, by all nodes, ends it."""
    error, operations = fault
    store, at = FakeStore(), count()

    def before(_verb, _name):
        if operation <= next(at) < operation + operations:
            raise error("here")

    store.before = before
    for node in ([0], [1, 2]):
        with suppress(SystemExit, StoreFailed):
            commit(store, own=node)
    store.before = lambda *_: None
    assert verify(store, FakeClock()) == []
    for node in ([1, 2], [0]):
        tried(store, own=node)
    assert [each.step for each in list_commits(store, FakeClock())[0]] == [7]
    assert verify(store, FakeClock()) == []


@pytest.mark.parametrize(
    ("number", "is_so", "is_said"), [(1, rb"(chain\W+)c", rb"\1d"), (2, rb"(number\W+)2", rb"\g<1>1")]
)
def test_parts_of_two_states_do_not_join(number, is_so, is_said):
    """Another document with the same rows, and other rows with the same one. What stands beside a
    state may differ.
    """
    beside = re.sub(rb"(sharded\W+m.)0", rb"\g<1>1", PARTS[1])
    assert beside != PARTS[1] and joined(list(map(safetensors_header.parse, (PARTS[0], beside, PARTS[2]))))
    parts = [PARTS[0], re.sub(is_so, is_said, PARTS[number]), PARTS[2]]
    with pytest.raises(CheckpointDamaged, match="part 1 is that of another state"):
        joined(list(map(safetensors_header.parse, parts)))


@pytest.mark.parametrize("is_late_first", [False, True])
@pytest.mark.parametrize("operation", range(30))
def test_a_failed_save_makes_room_for_the_next(operation, is_late_first):
    """Or other nodes, which have its parts, end it meanwhile, and keep no other one."""
    store, at = FakeStore(), count()
    commit(store, own=[0, 1, 2], step=5)
    tried(store, own=[0])
    alone = {"generation": 1, "resumed_from": None, "is_newest": lambda: True}

    def late():
        tried(store, own=[1], copies=[2])
        prune(store, FakeClock(), run_id="r", keep=1, step=7, **alone)

    sweep = partial(tried, store, own=[0], step=9)
    first, second = (late, sweep) if is_late_first else (sweep, late)
    store.before = lambda *_: second() if next(at) == operation else None
    first()
    store.before = lambda *_: None
    assert list_commits(store, FakeClock())[0] and verify(store, FakeClock()) == []
    commit(store, own=[0, 1, 2], step=10)
    assert not any(name.startswith(f"{9:012d}") for name in store.objects)


def test_a_record_of_other_parts_is_damage():
    store = FakeStore()
    record = commit(store, own=[0, 1, 2]).record
    for parts in (record.parts[:2], record.parts[::-1]):
        with pytest.raises(CheckpointDamaged, match="names other parts"):
            parse(replace(record, parts=parts).to_json())
