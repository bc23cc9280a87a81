"""A computation ends with the mean over shards of what the buffers became, however few of them are
copied and summed; what no forward changed keeps its bits.
"""

import copy
from functools import reduce

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic.errors import UsageError
from elastic.reduce.tree import fold, span
from elastic.train.state.state import State
from elastic.train.step.buffers import LARGE_NUMBERS, Buffers

CPU = torch.device("cpu")
LARGE = LARGE_NUMBERS + 3
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64]
WAYS = ["in place", "assigned", "through data", "data assigned"]


def holding(**tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def holder(forms):
    """A module with a buffer of each of these (dtype, numbers)."""

    draw, module = torch.Generator().manual_seed(0), nn.Module()
    for index, (dtype, numbers) in enumerate(forms):
        values = torch.randint(0, 7, (numbers,), generator=draw).to(torch.float64) / 3
        module.register_buffer(f"b{index}", values.to(dtype))
    return module


def changed(value, by):
    return ~value if value.dtype is torch.bool else value * 3 + by


def write(module, name, way, by):
    """Change a buffer. by: the number of the shard, for floats."""
    buffer = getattr(module, name)
    if not (buffer.is_floating_point() or buffer.is_complex()):
        by = 1  # integers must be the same on every shard
    with torch.no_grad():
        new = changed(buffer, by)
        match way:
            case "in place":
                buffer.copy_(new)
            case "assigned":
                setattr(module, name, new)
            case "through data":
                buffer.data.copy_(new)
            case "data assigned":
                buffer.data = new


def compute(ranks, shards, forward=lambda _module, _shard: None):
    """One computation of these ranks' (module, buffers), by forward(module, shard)."""
    after = [{} for _ in ranks]
    for rank, (module, buffers) in enumerate(ranks):
        buffers.begin([*module.modules()])
        for shard in span(shards, len(ranks), rank):
            buffers.load()
            forward(module, shard)
            after[rank][shard] = buffers.save()

    def summed():
        """The sum of all ranks' shards, in the order of the tree, once for each rank."""
        parts = {}
        for (_, buffers), of_rank in zip(ranks, after, strict=True):
            for shard, value in buffers.contributions(of_rank).items():
                parts[(shard, 1)] = value
        total = fold(parts, shards, lambda one, other: one.clone().add_(other))
        return [total.clone() for _ in ranks]

    totals = summed()
    found = {
        buffers.found_changes(buffers.sums.signs(total).tolist())
        for (_, buffers), total in zip(ranks, totals, strict=True)
    }
    assert len(found) == 1  # all ranks take part in the second sum, or none
    if found == {True}:
        totals = summed()
    for (_, buffers), total, of_rank in zip(ranks, totals, after, strict=True):
        signs = buffers.sums.signs(total).tolist()
        assert buffers.sums.have_same_integers(signs)
        buffers.end(total, signs, next(iter(of_rank.values())))


def plain(module, shards, forward):
    """The plain old way: each shard from a copy of all buffers; the mean over shards of all."""
    opening = {name: buffer.clone() for name, buffer in module.named_buffers()}
    left = []
    for shard in range(shards):
        forward(alone := holding(**{name: value.clone() for name, value in opening.items()}), shard)
        left.append(dict(alone.named_buffers()))
    for name, value in opening.items():
        values = [of_shard[name] for of_shard in left]
        if not (value.is_floating_point() or value.is_complex()):
            module.get_buffer(name).copy_(values[0])
        elif any(not torch.equal(each, value) for each in values):
            wide = torch.complex128 if value.is_complex() else torch.float64
            parts = {(shard, 1): each.to(wide) for shard, each in enumerate(values)}
            module.get_buffer(name).copy_(fold(parts, shards, lambda one, other: one + other) / shards)


@st.composite
def programs(draw):
    """(forms of buffers, shards, for each computation: which shard writes which buffer how)."""
    numbers = st.sampled_from([1, 5, LARGE])
    forms = draw(st.lists(st.tuples(st.sampled_from(DTYPES), numbers), min_size=1, max_size=4))
    shards = draw(st.integers(3, 6))
    computations = []
    for number in range(draw(st.integers(1, 4))):
        # What torch does not count is found in the first computation; for small buffers in each.
        writes = []
        for index, (dtype, size) in enumerate(forms):
            ways = WAYS if number == 0 or size < LARGE_NUMBERS else ["in place", "assigned", "data assigned"]
            if dtype.is_floating_point or dtype.is_complex:
                who = draw(st.sets(st.integers(0, shards - 1)))
            else:
                who = set(range(shards)) if draw(st.booleans()) else set()
            writes += [(shard, f"b{index}", draw(st.sampled_from(ways))) for shard in sorted(who)]
        body = draw(st.lists(st.tuples(st.integers(0, len(forms) - 1), st.sampled_from(WAYS)), max_size=2))
        computations.append((writes, body))
    return forms, shards, computations


def run(program, world_size):
    """The bits of all buffers after each computation, of each rank. world_size 0: the plain way."""
    forms, shards, computations = program
    modules = [holder(forms) for _ in range(world_size or 1)]
    ranks = [(module, Buffers(State(module=module), shards, CPU)) for module in modules]
    seen = []
    for writes, body in computations:

        def forward(module, shard, writes=writes):
            for writer, name, way in writes:
                if writer == shard:
                    write(module, name, way, shard)

        for module in modules:
            for index, way in body:
                write(module, f"b{index}", way, 1)
        if world_size:
            compute(ranks, shards, forward)
        else:
            plain(modules[0], shards, forward)
        seen.append([[bits(buffer) for buffer in module.buffers()] for module in modules])
    return seen


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


IN_A_BRANCH = (
    [(torch.float32, LARGE), (torch.bool, LARGE)],
    3,
    [([], []), ([(1, "b0", "in place")], [(0, "through data")]), ([(0, "b0", "assigned")], [])],
)
# The sum of 13 equal values divided by 13 is not always the value.
UNCHANGED = [(dtype, 20) for dtype in (torch.float16, torch.float32, torch.float64)], 13, [([], [])]


@settings(max_examples=25)
@given(programs())
@example(IN_A_BRANCH)
@example(UNCHANGED)
def test_every_world_size_has_the_bits_of_the_plain_way(program):
    """The plain way is the twin: it copies, and takes the mean of, everything for each shard."""
    expected = [of_ranks[0] for of_ranks in run(program, 0)]
    for world_size in (1, 2, 3):
        for of_ranks, of_plain in zip(run(program, world_size), expected, strict=True):
            assert of_ranks == [of_plain] * world_size


def test_a_large_buffer_costs_nothing_until_a_shard_changes_it():
    """Four masks of nanoGPT cost more than a second a step."""
    module = holder([(torch.float32, LARGE), (torch.int64, 1)])
    buffers = Buffers(State(net=module), 4, CPU)
    for _ in range(2):
        compute([(module, buffers)], 4)
    buffers.begin([*module.modules()])
    first = buffers.save()
    buffers.load()
    assert buffers.save().values[0] is first.values[0]
    assert buffers.sums.length < LARGE / 100
    compute([(module, buffers)], 4, lambda each, shard: shard == 2 and write(each, "b0", "in place", 1))
    assert buffers.sums.length > LARGE


@pytest.mark.parametrize(("one", "other"), [([0, 2, 0], [1, 0, 1]), ([0, 0], [0, -(2**63)]), ([0], [-1])])
def test_integers_of_equal_moment_are_told_apart(one, other):
    """Two shards count the labels 1, 1 and 0, 2: as many samples, with the same mean label.

    Or only the highest bits differ, as in a mask of 64 bits.
    """
    counts = torch.zeros(len(one), dtype=torch.int64)
    module = holding(counts=counts)
    buffers = Buffers(State(net=module), 2, CPU)
    buffers.begin([module])
    after = {}
    for shard, added in enumerate((one, other)):
        buffers.load()
        counts.add_(torch.tensor(added))
        after[shard] = buffers.save()
    total = reduce(torch.add, buffers.contributions(after).values())
    assert not buffers.sums.have_same_integers(buffers.sums.signs(total).tolist())
    assert buffers.changed_integers(after.values()) == "net.counts"


# In a step: the gradient is that of each shard alone in plain PyTorch.


class Scaled(nn.Module):
    """A running scale, which forward updates before it divides by it."""

    def __init__(self, update):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 4)
        self.register_buffer("scale", torch.ones(4))
        self.update = update

    def forward(self, x):
        y = self.layer(x)
        new = 0.5 * self.scale + 0.5 * (1 + y.detach().abs().mean(0))
        if self.update == "data":
            self.scale.data.mul_(new)
        elif self.update == "assigned":
            self.scale = new
        return y / self.scale


class Checkpointed(nn.Module):
    """Forward is computed again in backward, from what the buffers are then."""

    def __init__(self, body, *, use_reentrant):
        super().__init__()
        self.first, self.body, self.use_reentrant = nn.Linear(FEATURES, FEATURES), body, use_reentrant

    def forward(self, x):
        return checkpoint(self.body, self.first(x), use_reentrant=self.use_reentrant)


class Cache(nn.Linear):
    """A buffer that is no part of the state, and made anew by each forward."""

    def forward(self, x):
        self.register_buffer("extra", torch.zeros(4), persistent=False)
        return super().forward(x)


def normalized():
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5, momentum=0.3), nn.Linear(5, 4))


MODELS = {
    "batch norm": normalized,
    "old spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(FEATURES, 5)), nn.Tanh()),
    "through data": lambda: Scaled("data"),
    "assigned": lambda: Scaled("assigned"),
    "checkpointed batch norm": lambda: Checkpointed(normalized(), use_reentrant=False),
    "reentrant batch norm": lambda: Checkpointed(normalized(), use_reentrant=True),
    "checkpointed cache": lambda: Checkpointed(Cache(FEATURES, 4), use_reentrant=False),
}


def begun(net):
    return next(steps(ALONE, State(net=net)))


def energy(net):
    return lambda batch: net(batch.data[0]).square().sum()


def shard_alone(net, batch):
    """In plain PyTorch: (gradients, buffers that forward left) of one shard, from these buffers."""
    alone = copy.deepcopy(net)
    loss = energy(alone)(batch) / 8
    left = {name: buffer.clone() for name, buffer in alone.named_buffers()}
    loss.backward()
    return [p.grad for p in alone.parameters()], left


@pytest.mark.parametrize("form", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_that_changes_buffers_has_its_plain_gradient(name, form):
    """All graphs of a sum are alive at once: what a later shard writes into a buffer must not reach
    the backward of an earlier one.
    """
    torch.manual_seed(0)
    net = MODELS[name]()
    opening, step = copy.deepcopy(net), begun(net)
    alone = [shard_alone(opening, batch) for batch in step._batches]
    if form == "mean":
        step.mean_loss(energy(net))
    else:
        total = step.sum(energy(net)) / 8
        if name == "batch norm":
            net(torch.ones(2, FEATURES))  # of the body's own, in training mode: averages are put back
        step.backward(total)
    for parameter, *of_shards in zip(net.parameters(), *[gradients for gradients, _ in alone], strict=True):
        torch.testing.assert_close(parameter.grad, sum(of_shards))
    for path, buffer in net.named_buffers():
        values = torch.stack([left[path] for _, left in alone if path in left]).double()
        torch.testing.assert_close(buffer, values.mean(0).to(buffer.dtype))


ENDINGS = {
    "mean_loss": lambda step, _total, net: step.mean_loss(energy(net)),
    "backward": lambda step, total, _net: step.backward(total),
    "by hand": lambda step, _total, _net: step.end_by_hand(),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("way", ["in place", "assigned"])
def test_a_buffer_set_between_a_sum_and_the_gradients_is_refused(ending, way):
    """A centre that is updated from a sum, before the loss, would be put back unseen."""
    step = begun(net := Scaled(None))
    with torch.set_grad_enabled(ending == "backward"):
        total = step.sum(lambda batch: net.layer(batch.data[0]).sum())
    write(net, "scale", way, 1)
    with pytest.raises(UsageError, match=r"the loop's body changed net\.scale between a sum"):
        ENDINGS[ending](step, total, net)


@pytest.mark.parametrize("value", [torch.zeros(5), torch.zeros(1, dtype=torch.float64), None])
def test_a_buffer_that_forward_gives_another_form_is_refused(value):
    """Ranks would sum vectors of different lengths."""
    net = holding(mean=torch.zeros(1), other=torch.zeros(1))
    net.layer = nn.Linear(FEATURES, 1)

    def loss(batch):
        net.mean = value
        return energy(net.layer)(batch)

    with pytest.raises(UsageError, match=r"net\.mean to stay torch\.float32 of shape \[1\]"):
        begun(net).mean_loss(loss)


class Queue(nn.Module):
    """A memory bank that forward fills, beside a constant and a BatchNorm."""

    def __init__(self, dtype):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
        self.register_buffer("queue", torch.zeros(CLASSES, dtype=dtype))
        self.register_buffer("constant", torch.rand(5, dtype=torch.float64))

    def forward(self, x):
        y = self.body(x)
        self.queue.copy_((100 * y.detach().amax(0)).to(self.queue.dtype))
        return y


def averaged(member, dtype, shards):
    """Which buffers became a mean in the first step, or the refusal of it."""
    torch.manual_seed(0)
    net = Queue(getattr(torch, dtype))
    step = next(steps(member, State(net=net), shards=shards))
    try:
        step.mean_loss(energy(net))
    except UsageError as error:
        return str(error)
    return step.averaged


@pytest.mark.parametrize("world_size", [1, 2])
def test_averaged_buffers_are_named_other_integers_refused(ranks, world_size):
    """But for running averages of torch; also where each rank has one shard, and sees a difference
    from the mean alone.
    """
    for shards in (2 * world_size, 2):
        assert ranks.run(world_size, averaged, "float32", shards) == [["net.queue"]] * world_size
    for said in ranks.run(world_size, averaged, "int64", 8):
        assert "same after every shard" in said and "net.queue" in said
