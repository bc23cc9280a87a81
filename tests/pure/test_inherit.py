"""Ranks begin from one state of another run, or all refuse it alike."""

import os
import select
from contextlib import suppress
from pathlib import Path

import pytest
from committed import begin_run, commit_in
from records import IDENTITY
from steps import ALONE, groups_of
from torch import nn

from elastic.config import identity
from elastic.config.environment import AgentLink
from elastic.config.parent import Parent
from elastic.errors import UsageError
from elastic.proof.agreement import Comparison
from elastic.storage.local import LocalStore
from elastic.system.untrusted import decode, encode
from elastic.testing.fakes import FakeClock, FakeStore
from elastic.train.state.inherit import Inheritance
from elastic.train.state.restore import LocalSnapshots, Restorer
from elastic.train.state.state import State

LEFT = "left"  # a pipe


def model(value: float, width: int = 2) -> nn.Linear:
    module = nn.Linear(width, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return module


@pytest.fixture
def parent(tmp_path):
    """The committed state of step 40 of a run in tmp_path/first, with the weight 40."""
    record = commit_in(begin_run(tmp_path / "first", IDENTITY), IDENTITY, 40, State(model=model(40.0)))
    return Parent(run_id=IDENTITY.run_id, url=str(tmp_path / "first"), step=40, digest=record.digest)


def restore(member, parent, own, state, store=LocalStore):
    """Restore a run of the folder `own`, which has no state of its own."""
    groups = groups_of(member)
    restorer = Restorer(
        groups=groups,
        store=FakeStore(),
        local=LocalSnapshots(None),
        comparison=Comparison(groups=groups, node="a", generation=1, log=None),
        run_id="run",
        run_url="/runs/new",
        link=AgentLink(pid=1, node="a", run_dir="runs/a", generation=1, control_page="", uploader=""),
        log=None,
        clock=FakeClock(),
        faults=None,
        inheritance=Inheritance(parent=parent, run_store=store(Path(own))),
    )
    return restorer.restore(state)


def begun(member, written, own):
    """The weight that a rank begins with, and where its chain begins; each rank built another."""
    mine = model(-1.0 - member.rank)
    found = restore(member, decode(Parent, written, what="parent"), own, State(model=mine))
    return [found.step, found.source, found.chain, mine.weight[0, 0].item()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_rank_begins_with_the_parents_numbers_and_chain(ranks, tmp_path, parent, world_size):
    """Rank 0 reads them. The chain goes on from the digest: other parents, other chains."""
    expected = [0, "parent", parent.digest, 40.0]
    assert ranks.run(world_size, begun, encode(parent), str(tmp_path)) == [expected] * world_size


def refusal(member, written, own, width_of_rank):
    state = State(model=model(0.0, width_of_rank[member.rank]))
    with pytest.raises(UsageError) as raised:
        restore(member, decode(Parent, written, what="parent"), own, state)
    return str(raised.value)


@pytest.mark.parametrize("width_of_rank", [(3, 3), (2, 3)])
def test_where_one_rank_cannot_take_it_all_refuse(ranks, tmp_path, parent, width_of_rank):
    """On both ranks, or on the second alone: a rank that went on would wait for ever."""
    first, second = ranks.run(2, refusal, encode(parent), str(tmp_path), width_of_rank)
    assert first == second
    assert "model.weight is float32 [1, 2] there and float32 [1, 3] here" in first


class DeletesLast(LocalStore):
    """Deletes once the other rank has left, or half a second later."""

    def delete(self, name):
        left = os.open(self._root / LEFT, os.O_RDONLY | os.O_NONBLOCK)
        select.select([left], [], [], 0.5)
        os.close(left)
        super().delete(name)


def finds_on_leaving(member, written, own):
    """Whether the run directory is still claimed when this rank leaves."""
    with pytest.raises(UsageError):
        restore(member, decode(Parent, written, what="parent"), own, State(model=model(0.0, 3)), DeletesLast)
    is_claimed = Path(own, identity.NAME).exists()
    if member.rank == 1:
        with suppress(OSError):
            os.write(os.open(Path(own, LEFT), os.O_WRONLY | os.O_NONBLOCK), b"left")
    return is_claimed


def test_no_rank_leaves_before_the_run_directory_is_given_back(ranks, tmp_path, parent):
    """The agent ends every rank when the first one has left, so the first one's delete would never
    be done, and the corrected command would be refused.
    """
    own = begin_run(tmp_path / "own", IDENTITY)
    os.mkfifo(own / LEFT)
    assert ranks.run(2, finds_on_leaving, encode(parent), str(own)) == [False, False]


def test_a_parent_that_is_gone_or_damaged_is_never_begun_from(tmp_path, parent):
    """After the command found it: its bytes are flipped, then its run is deleted."""
    (payload,) = (tmp_path / "first").glob("checkpoints/*/*/state.safetensors")
    payload.write_bytes(payload.read_bytes()[:-1] + b"!")
    state = State(model=(untouched := model(0.0)))
    with pytest.raises(UsageError, match=r"expected step 40 of .*, found it damaged: .*sha256"):
        restore(ALONE, parent, tmp_path / "own", state)
    (payload.parents[1] / "COMMIT.json").unlink()
    with pytest.raises(UsageError, match=r"expected step 40 of .*, found that it is no longer there"):
        restore(ALONE, parent, tmp_path / "own", state)
    assert untouched.weight[0, 0].item() == 0.0
