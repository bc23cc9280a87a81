"""Attacks on a restore: ranks whose agents count differently, and states that load half-way."""

import pytest
import torch
from torch import nn

from elastic.snapshot import image
from elastic.snapshot.slots import SnapshotInfo, SnapshotSlots
from elastic.testing.fakes import FakeClock, FakeStore
from elastic.train.process_groups import ProcessGroups
from elastic.train.restore import LocalSnapshot, Restorer
from elastic.train.restore_order import RESTORES_OF_ONE_STATE
from elastic.train.state import State


def model(value):
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def memory_with(state, step):
    """The memory of a node that has a snapshot of this state."""
    flat = state.flatten()
    laid_out = image.layout(flat.tensors, {"state": flat.document, "chain": "chain"})
    slots = SnapshotSlots.create(laid_out.size_bytes, 1)
    slot = slots.begin()
    checksum = image.copy_into(laid_out, slots.body(slot))
    info = SnapshotInfo(
        step=step, epoch=0, generation=1, world_size=1, torch=torch.__version__, checksum=checksum
    )
    slots.publish(slot, size_bytes=laid_out.size_bytes, info=info)
    return slots


def restorer(slots, *, failures=0, rank=0, world_size=1, group=None):
    """Without any checkpoint in the store."""
    groups = ProcessGroups(
        rank=rank, world_size=world_size, local_rank=0, device=torch.device("cpu"), control=group
    )
    return Restorer(
        groups=groups,
        store=FakeStore(),
        local=LocalSnapshot(slots),
        run_id="run",
        failures=failures,
        log=None,
        clock=FakeClock(),
        faults=None,
    )


def restored(member, step_of_rank, failures_of_rank):
    """The step that this rank resumes from, and the weight that it then has: the step's number."""
    step = step_of_rank[member.rank]
    slots = memory_with(State(model=model(float(step))), step)
    state = State(model=(mine := model(0.0)))
    failures = failures_of_rank[member.rank]
    found = restorer(
        slots, failures=failures, rank=member.rank, world_size=member.world_size, group=member.group
    ).restore(state)
    return [found.step, mine.weight[0, 0].item()]


@pytest.mark.parametrize("failures", [[0, RESTORES_OF_ONE_STATE + 1], [RESTORES_OF_ONE_STATE + 1, 0]])
def test_ranks_whose_agents_counted_different_failures_restore_one_state(ranks, failures):
    """The node that just joined counts 0. Its snapshot is the newest, or it is another node's."""
    assert ranks.run(2, restored, [9, 8], failures) == [[8, 8.0]] * 2
