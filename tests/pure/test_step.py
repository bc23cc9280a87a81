"""A run of small steps leaves the same bits at every world size, over real ranks."""

from functools import cache, partial

import pytest
import torch
from steps import CPU, parts_of
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.utils.data import TensorDataset

from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail
from elastic.reduce import bucket as bucket_module
from elastic.testing.ranks import Member
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State
from elastic.train.step.parts import Requests
from elastic.train.step.step import Step

SAMPLES, BATCH, CLASSES = 60, 24, 3
DRAIN_AT, OVERFLOW_AT = 3, 2


class Net(nn.Module):
    """All that could depend on the world size: statistics of a batch, dropout, a layer that no
    shard uses, one that few use, odd buffers.
    """

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Dropout(0.3), nn.Linear(17, CLASSES)
        )
        self.unused = nn.Linear(2, 2)
        self.rare = nn.Parameter(torch.ones(CLASSES))
        self.register_buffer("wide", torch.rand(3, dtype=torch.float64))
        self.register_buffer("moving", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, x, *, is_rare=False):
        y = self.body(x)
        with torch.no_grad():
            self.moving.lerp_(y.double().mean(0), 0.1)
        return y * self.rare if is_rare else y


def data():
    draw = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, 6, generator=draw), torch.randint(CLASSES, (SAMPLES,), generator=draw)


class Loop:
    """The trainer's loop without restores, snapshots and saves."""

    def __init__(self, member, state, *, shards, epochs=2):
        self.member = member
        self.order = SampleOrder(
            seed=5, samples=SAMPLES, global_batch=BATCH, shards=shards, epochs=epochs, tail=Tail.PAD
        )
        self.parts = parts_of(state, self.order, member)
        loader = Loader(dataset=TensorDataset(*data()), order=self.order, device=CPU)
        self.batches = loader.steps(self.parts.exchange.own_shards, 1)

    def step(self, number):
        """The last rank alone asks for a drain at one step.

        Rank 0 asks for a save at the next one, and then for a snapshot.
        """
        is_last, is_first = self.member.rank == self.member.world_size - 1, self.member.rank == 0
        requests = Requests(
            drain=is_last and number == DRAIN_AT,
            save=is_first and number == DRAIN_AT + 1,
            snapshot=is_first and number == DRAIN_AT + 2,
            compare=is_first and number == DRAIN_AT + 3,
        )
        return Step(number, self.parts, partial(next, self.batches), lambda _number: requests)

    def steps(self):
        for number in range(1, self.order.steps + 1):
            yield self.step(number)
        self.parts.gradients.close()
        self.parts.contract.close()


def mean_form(step, net, scaler):
    def loss(batch):
        found = F.cross_entropy(net(batch.data[0], is_rare=batch.shard == 4), batch.data[1])
        return (
            found * 1e38 if scaler is not None and step.number == OVERFLOW_AT and batch.shard == 1 else found
        )

    step.mean_loss(loss, scaler)


def sum_form(step, net, scaler):
    """Two sums, one of them float64 and coupled over the batch, and a penalty on parameters."""
    coupled = step.sum(lambda batch: net(batch.data[0]).double().square().sum(0))
    noise = step.sum(
        lambda batch: (net(batch.data[0], is_rare=batch.shard == 4) * torch.rand(CLASSES)).sum(
            0, keepdim=True
        )
    )
    loss = (
        (coupled / BATCH).square().mean()
        + (noise / BATCH).exp().sum()
        + 1e-2 * net.body[0].weight.square().sum()
    )
    step.backward(loss, scaler)


FORMS = {"mean": mean_form, "sum": sum_form}


def train(member, shards, form, is_scaled, bucket_bytes=256):
    """A whole small run; what it leaves behind, in bits.

    bucket_bytes: small, so that there are several buckets, whose order and overlap matter. Ranks
    serve other tests afterwards, and must all have the same buckets then.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_module, "BUCKET_BYTES", bucket_bytes)
        return _train(member, shards, form, is_scaled)


def _train(member, shards, form, is_scaled):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if is_scaled else None
    seen = {"loss": [], "drain": [], "save": [], "snapshot": [], "compare": [], "scale": []}
    state = State(net=net, optimizer=optimizer, **({} if scaler is None else {"scaler": scaler}))
    for step in Loop(member, state, shards=shards).steps():
        FORMS[form](step, net, scaler)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            seen["scale"].append(scaler.get_scale())
        seen["loss"].append([number.hex() for number in (step.outcome.loss, *step.outcome.gradient_norms)])
        for name in ("drain", "save", "snapshot", "compare"):
            seen[name].append(getattr(step.outcome.requests, name))
    unused = [net.unused.weight.grad, net.unused.bias.grad]
    return seen | {
        "digest": checksum_of(state.flatten()).whole,
        "unused": unused,
        "rare": net.rare.grad is not None,
    }


@pytest.fixture(scope="module")
def trained(ranks):
    """What each rank of a world leaves behind, by size and arguments; each run is computed once."""
    return cache(partial(_train_together, ranks))


def _train_together(ranks, world_size, *arguments):
    return ranks.run(world_size, train, *arguments)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("shards", "form", "is_scaled"),
    [
        (8, "mean", False),
        (8, "sum", False),
        (6, "mean", True),
        (6, "sum", True),
        (6, "mean", False),
        (4, "sum", False),
    ],
)
def test_a_run_leaves_the_same_bits_at_every_world_size(trained, world_size, shards, form, is_scaled):
    """AdamW over two epochs; the digest is of parameters, buffers, moments and scaler, and each
    step's loss and norms must agree too.
    """
    alone = trained(1, shards, form, is_scaled)
    assert trained(world_size, shards, form, is_scaled) == alone * world_size


@pytest.mark.parametrize("form", FORMS)
def test_a_run_leaves_the_same_state_with_any_size_of_bucket(trained, form):
    """Buckets decide what travels when, and must not decide what comes out: one for each parameter,
    against one for all.
    """
    one_each, all_in_one = (trained(3, 8, form, False, size)[0]["digest"] for size in (1, 2**20))
    assert one_each == all_in_one == trained(1, 8, form, False)[0]["digest"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_drain_or_save_asked_by_one_rank_is_seen_by_all_at_that_step(trained, world_size):
    """The last rank asks for the drain, rank 0 for the save; a rank that missed it would train on
    alone, or hang.
    """
    for seen in trained(world_size, 6, "mean", False):
        steps = range(1, len(seen["drain"]) + 1)
        assert [n for n in steps if seen["drain"][n - 1]] == [DRAIN_AT]
        assert [n for n in steps if seen["save"][n - 1]] == [DRAIN_AT + 1]
        assert [n for n in steps if seen["snapshot"][n - 1]] == [DRAIN_AT + 2]
        assert [n for n in steps if seen["compare"][n - 1]] == [DRAIN_AT + 3]


def test_an_overflow_on_one_shard_is_skipped_by_all_ranks(trained):
    """Shard 1's gradient overflows at step 2; every rank's scaler must skip the step and halve the
    scale.
    """
    for seen in trained(4, 6, "mean", True):
        assert seen["scale"][:3] == [1024.0, 512.0, 512.0]


def test_parameters_that_no_shard_touched_keep_no_gradient(trained):
    """A zero gradient would let AdamW's weight decay shrink a layer that plain PyTorch leaves
    alone; one that a single shard touched has one.
    """
    (found,) = trained(1, 8, "mean", False)
    assert found["unused"] == [None, None]
    assert found["rare"]


def test_a_step_passes_its_points_in_order():
    """Faults strike at these points; one that is not passed could never be drilled."""
    for form, expected in {
        "mean": ["forward", "backward"] * 4 + ["mid-sum"],
        "sum": ["forward"] * 8 + ["backward"] * 4 + ["mid-sum"],
    }.items():
        torch.manual_seed(0)
        net, passed = Net(), []
        step = Loop(Member(rank=0, world_size=1, group=None), State(net=net), shards=4).step(1)
        step.fault_point = passed.append
        FORMS[form](step, net, None)
        assert passed == expected
