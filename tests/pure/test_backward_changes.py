"""What a backward writes into a buffer is refused by name, but for averages of normalisations."""

import copy
import re

import pytest
import torch
from audited import Training
from hypothesis import example, given, settings
from hypothesis import strategies as st
from steps import ALONE, FEATURES, samples, steps
from torch import nn

from elastic.errors import UsageError
from elastic.train import buffers
from elastic.train.backward_changes import differing
from elastic.train.buffers import STILL_NUMBERS
from elastic.train.state import State

SHARDS = 2
LARGE = STILL_NUMBERS + 3
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
# What torch does not count is found in the first computation.
COUNTED = ["in place", "assigned", "same bits", "same bits assigned"]
WAYS = [*COUNTED, "through data", "data assigned"]
REFUSAL = "found another content in {}: a hook"


def write(module, name, way):
    """Change a buffer, or leave another tensor or count of changes with the same bits."""
    buffer = getattr(module, name)
    new = ~buffer if buffer.dtype is torch.bool else buffer * 3 + 1
    with torch.no_grad():
        match way:
            case "in place":
                buffer.copy_(new)
            case "assigned":
                setattr(module, name, new)
            case "through data":
                buffer.data.copy_(new)
            case "data assigned":
                buffer.data = new
            case "same bits":
                buffer.copy_(buffer.clone())
            case "same bits assigned":
                setattr(module, name, buffer.clone())
            case "another size":
                setattr(module, name, torch.ones(len(buffer) + 1))


class Writing(nn.Module):
    """forward, backward: the ways in which these write buffers, by their names."""

    def __init__(self, forms, forward, backward):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 4)
        self.ways, self.ways_backward, self.is_on = forward, backward, True
        for index, (dtype, numbers, is_saved) in enumerate(forms):
            values = torch.arange(2, numbers + 2).remainder(7)
            self.register_buffer(f"b{index}", values.to(dtype), persistent=is_saved)

    def forward(self, x):
        y = self.layer(x)
        for name, way in self.ways.items():
            write(self, name, way)
        if y.requires_grad:
            y.register_hook(self.hook)
        return y

    def hook(self, _gradient):
        for name, way in self.ways_backward.items() if self.is_on else ():
            write(self, name, way)


def energy(net):
    return lambda batch: net(batch.data[0]).square().sum()


def computed(step, net, form="mean"):
    if form == "mean":
        step.mean_loss(energy(net))
    else:
        step.backward(step.sum(energy(net)) / 8)


@st.composite
def programs(draw):
    """(buffers, forward's ways, backward's ways, the form of the loss, computations before)."""
    kinds = st.tuples(st.sampled_from(DTYPES), st.sampled_from([1, 5, LARGE]), st.booleans())
    forms = draw(st.lists(kinds, min_size=1, max_size=4))
    earlier = draw(st.integers(0, 1))
    forward, backward = {}, {}
    for index, (_, _, is_saved) in enumerate(forms):
        of_forward = ["same bits", "same bits assigned", *(["in place", "assigned"] if is_saved else [])]
        of_backward = [
            *(WAYS if is_saved and not earlier else COUNTED),
            *([] if is_saved else ["another size"]),
        ]
        for ways, known in ((forward, of_forward), (backward, of_backward)):
            if draw(st.booleans()):
                ways[f"b{index}"] = draw(st.sampled_from(known))
    return forms, forward, backward, draw(st.sampled_from(["mean", "sum"])), earlier


def changed_in_plain_pytorch(net, batch):
    """The names of buffers that one shard's backward changes, compared before and after it."""
    alone = copy.deepcopy(net)
    loss = energy(alone)(batch)
    before = {name: buffer.clone() for name, buffer in alone.named_buffers()}
    loss.backward()
    unsaved = alone._non_persistent_buffers_set
    return {
        name
        for name, now in alone.named_buffers()
        if not (name in unsaved and now.shape != before[name].shape) and not torch.equal(now, before[name])
    }


ASSIGNED_FIRST = ([(torch.float32, 5, True)], {"b0": "assigned"}, {"b0": "in place"}, "mean", 0)
LARGE_ONE = ([(torch.bool, LARGE, True)], {}, {"b0": "in place"}, "sum", 1)
UNSAVED = ([(torch.float32, 5, False), (torch.float32, 1, True)], {}, {"b0": "assigned"}, "mean", 1)


@settings(max_examples=60, deadline=None)
@given(programs())
@example(ASSIGNED_FIRST)
@example(LARGE_ONE)
@example(UNSAVED)
def test_what_a_backward_changes_is_refused_and_nothing_else(program):
    """Beside plain PyTorch, where contents are read before and after the backward of a shard."""
    forms, forward, backward, form, earlier = program
    net = Writing(forms, forward, backward)
    net.is_on = not earlier
    every = steps(ALONE, State(net=net), shards=SHARDS)
    for _ in range(earlier):
        computed(next(every), net, form)
    net.is_on = True
    step = next(every)
    expected = changed_in_plain_pytorch(net, step._batches[0])
    if not expected:
        computed(step, net, form)
        return
    with pytest.raises(UsageError) as refused:
        computed(step, net, form)
    assert set(re.findall(r"net\.(b\d)", str(refused.value))) == expected


def hooked(net, way, *, only=lambda _gradient: True):
    """Beside the layer, a buffer that a hook on its output writes. only: for which gradients."""
    net.register_buffer("norm", torch.ones(2))

    def hook(_module, _inputs, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: write(net, "norm", way) if only(gradient) else None)

    net.register_forward_hook(hook)
    return net


def test_a_write_of_the_last_shard_alone_is_refused():
    """No later shard would have reset it: it was lost as the step ended."""
    seen = []
    net = hooked(nn.Linear(FEATURES, 4), "in place", only=lambda _: len(seen) == 8)
    with pytest.raises(UsageError, match=REFUSAL.format(r"net\.norm")):
        next(steps(ALONE, State(net=net))).mean_loss(lambda b: seen.append(1) or energy(net)(b))


def told(member, form):
    """What the rank reads of the refusal."""
    net = hooked(nn.Linear(FEATURES, 4), "in place")
    try:
        for step in steps(member, State(net=net)):
            computed(step, net, form)
    except UsageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("form", ["mean", "sum"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_write_of_every_shard_is_refused_alike_on_every_rank(ranks, world_size, form):
    said = ranks.run(world_size, told, form)
    assert len(set(said)) == 1
    assert REFUSAL.format("net.norm") in said[0]


@pytest.mark.parametrize("found", [None, torch.zeros(3)], ids=["a tensor taken away", "a tensor put there"])
def test_a_place_that_becomes_empty_or_full_is_refused(found):
    """Also in the first step, in which contents are compared."""
    net = nn.Linear(FEATURES, 4)
    net.register_buffer("norm", torch.zeros(3) if found is None else None)
    net.weight.register_hook(lambda _: setattr(net, "norm", found))
    with pytest.raises(UsageError, match=REFUSAL.format(r"net\.norm")):
        next(steps(ALONE, State(net=net))).mean_loss(energy(net))


def test_a_write_in_the_backward_of_the_loss_itself_is_refused():
    """A penalty that the body computes with the model has a graph of its own, past the sums."""
    net = hooked(nn.Linear(FEATURES, 4), "in place")
    step = next(steps(ALONE, State(net=net)))
    total = step.sum(lambda batch: net.weight.sum() * batch.data[0].mean())
    with pytest.raises(UsageError, match=REFUSAL.format(r"net\.norm")):
        step.backward(total + net(samples().tensors[0]).square().sum())


def test_a_backward_inside_the_function_is_a_part_of_the_forward():
    """As a penalty on the norm of a gradient has it: what it writes is saved as the forward's."""

    def loss(batch):
        inputs = batch.data[0].clone().requires_grad_()
        output = net(inputs).square().sum()
        (gradient,) = torch.autograd.grad(output, inputs, create_graph=True)
        hooks.clear()
        return output.detach() + gradient.square().sum()

    hooks, net = [1], nn.Linear(FEATURES, 4)
    hooked(net, "in place", only=lambda _: bool(hooks))
    step = next(steps(ALONE, State(net=net), shards=1))
    step.mean_loss(loss)
    assert net.norm.tolist() == [4, 4]


def test_contents_are_compared_in_the_first_step_alone_where_the_body_assigns_a_buffer_in_each(monkeypatch):
    """The places are looked for again then; on a GPU each comparison is a wait for it."""
    compared = []
    monkeypatch.setattr(buffers, "differing", lambda places: compared.append(number) or differing(places))
    net = nn.Linear(FEATURES, 4)
    net.register_buffer("scale", torch.ones(1))
    for number, step in enumerate(steps(ALONE, State(net=net), shards=SHARDS)):
        net.scale = torch.full((1,), float(number))
        net.zero_grad()
        computed(step, net)
    assert compared == [0] * SHARDS


def test_a_write_past_the_count_that_begins_late_is_refused_in_an_audited_step():
    """Torch counts no write through `.data`, and contents are compared in no step between."""
    numbers = []
    net = hooked(nn.Linear(FEATURES, 4), "through data", only=lambda _: len(numbers) > 1)
    every = Training(ALONE, {"net": net}).steps()
    computed(next(every), net)
    numbers += [1, 2]
    step = next(every)
    with pytest.raises(UsageError, match=REFUSAL.format(r"net\.norm")):
        computed(step, net)
