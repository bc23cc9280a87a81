"""What one function of a step leaves behind is of its last shard: another one must not read it."""

import copy
import io
from contextlib import suppress
from functools import partial

import pytest
import torch
from audited import ALONE, CLASSES, Training
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.errors import UsageError
from elastic.train.flat_state import checksum_of
from elastic.train.state import State
from elastic.train.values import Values

FOUND = {}


class Net(nn.Module):
    """Keeps the features and the numbers of its newest batch, as classes of published code do."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x):
        self.features = torch.relu(self.body(x))
        FOUND["features"] = self.features.detach()
        self.logits = self.head(self.features - self.center)
        return self.logits

    def loss_of(self, batch):
        loss = F.cross_entropy(self(batch.data[0]), batch.data[1])
        self.parts, self.last_loss = {"loss": loss.detach(), "weight": 1.0}, float(loss.detach())
        return loss


def center(net, step):
    net.center.lerp_(step.sum(lambda _batch: net.features.detach().sum(0)), 0.1)


def center_of_hook(net, step):
    net.center.lerp_(step.sum(lambda _batch: FOUND["features"].sum(0)), 0.1)


def certainty(net, step):
    step.sum(lambda batch: net.logits.detach().softmax(1).gather(1, batch.data[1][:, None]).sum())


def own_center(net, step):
    def of_shard(batch):
        net(batch.data[0])
        return net.features.detach().sum(0)

    net.center.lerp_(step.sum(of_shard), 0.1)


def nothing(net, step):
    step.sum(lambda batch: batch.data[0].sum())


def train(second, *, begins, shards=6):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    training = Training(ALONE, {"net": net, "optimizer": optimizer}, shards=shards, looks=True, audits=False)
    done = 0
    for step in training.steps():
        step.mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
        optimizer.step()
        if step.number >= begins:
            second(net, step)
        done += 1
    return done


@pytest.mark.parametrize("begins", [1, 3])
@pytest.mark.parametrize(
    ("second", "name"),
    [(center, "net.features"), (center_of_hook, "FOUND['features']"), (certainty, "net.logits")],
)
def test_a_function_that_reads_what_another_one_left_behind_is_refused(second, name, begins):
    """A centre of features, a feature hook, a metric: at each number of workers the last shard
    is another one. It may begin late.
    """
    with pytest.raises(
        UsageError, match=rf"step {begins}: .* reads what the function of an earlier"
    ) as error:
        train(second, begins=begins)
    assert name in str(error.value)


@pytest.mark.parametrize("second", [own_center, nothing])
def test_a_function_that_computes_what_it_reads_is_left_alone(second):
    assert train(second, begins=1) > 3


def test_one_shard_has_no_other_one():
    assert train(center, begins=1, shards=1) > 3


class Sink:
    """What a loop can change by what it reads."""

    def __init__(self, net, optimizer):
        self.net, self.optimizer = net, optimizer
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        self.values = Values(center=torch.zeros(8), best=9.0)
        self.shown = []


def into_buffer(sink, _step):
    sink.net.center.lerp_(sink.net.features.detach().mean(0), 0.1)


def in_place_of_buffer(sink, _step):
    sink.net.center = FOUND["features"].mean(0)


def through_scratch(sink, _step):
    scratch = torch.zeros(8)
    scratch += sink.net.features.detach().mean(0)
    with torch.no_grad():
        sink.net.center.copy_(torch.stack([scratch, scratch]).mean(0))


def into_weights(sink, _step):
    sink.net.head.weight.data.mul_(sink.net.features.detach().std())


def into_gradient(sink, _step):
    sink.net.head.bias.grad = sink.net.logits.detach().mean(0)
    sink.optimizer.step()


def into_rate(sink, _step):
    sink.optimizer.param_groups[0]["lr"] = sink.net.logits.detach().std()


def into_values(sink, _step):
    sink.values.center = sink.net.features.detach().mean(0)


def into_number_of_values(sink, _step):
    sink.values.best = sink.net.parts["loss"].detach()


def into_plateau(sink, _step):
    sink.plateau.step(sink.net.parts["loss"].detach())


def into_decision(sink, _step):
    if sink.net.parts["loss"] < 0.1:
        sink.shown.append("small")


def into_loss(sink, step):
    sink.optimizer.zero_grad()
    step.backward(step.sum(lambda batch: sink.net(batch.data[0]).sum()) + sink.net.logits.sum())


def into_backward(sink, _step):
    sink.net.logits.sum().backward()


def into_function(sink, step):
    kept = sink.net.features.detach().mean(0)
    step.sum(lambda batch: batch.data[0].sum() + kept.sum())


def show(sink, _step):
    net = sink.net
    sink.shown.append(f"{net.features.shape} {net.logits.detach().mean():.3f} {net.parts['loss']}")
    assert net.features is not None
    twin = copy.deepcopy({"features": FOUND["features"], "net": net.head})
    torch.save(twin, io.BytesIO())
    sink.shown += [net.features.detach().softmax(1), FOUND]


def loop_with(body, *, said=None):
    """Steps whose body is `body`, from step 2 on; said: gets what the loop would say."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sink = Sink(net, optimizer)
    objects = {"net": net, "optimizer": optimizer, "values": sink.values}
    training = Training(ALONE, objects, looks=True, audits=False)
    for step in training.steps():
        step.mean_loss(net.loss_of)
        if step.number > 1:
            body(sink, step)
        optimizer.step()
        found = training.parts.contract.end_step()
        if said is not None and found:
            said.append(found)
    return checksum_of(State(**objects).flatten()).whole


CHANGES = "changes the State by it"
READ = [
    (into_buffer, "net.features", CHANGES),
    (in_place_of_buffer, "FOUND['features']", "makes center of it"),
    (through_scratch, "net.features", CHANGES),
    (into_weights, "net.features", CHANGES),
    (into_gradient, "net.logits", CHANGES),
    (into_rate, "net.logits", CHANGES),
    (into_values, "net.features", CHANGES),
    (into_number_of_values, "net.parts['loss']", CHANGES),
    (into_plateau, "net.parts['loss']", CHANGES),
    (into_decision, "net.parts['loss']", "decides by it"),
    (into_loss, "net.logits", "takes gradients of it"),
    (into_backward, "net.logits", "takes gradients of it"),
]


@pytest.mark.parametrize(("body", "name", "does"), READ, ids=[each[0].__name__ for each in READ])
def test_a_body_that_uses_what_a_function_left_behind_is_refused(body, name, does):
    """By one worker, at the step where it begins, however the body computes with it: the other
    workers' last shards are others.
    """
    with pytest.raises(UsageError, match=r"step 2: the loop's body reads") as error:
        loop_with(body)
    assert f"reads {name}, which" in str(error.value)
    assert does in str(error.value)


def test_a_second_function_that_uses_what_the_body_read_there_is_refused():
    with pytest.raises(UsageError, match=r"step 2: .* reads what the function of an earlier call"):
        loop_with(into_function)


def test_a_refusal_that_the_recipe_catches_ends_the_run_at_the_end_of_the_step():
    def catching(sink, step):
        with suppress(Exception):
            into_buffer(sink, step)

    with pytest.raises(UsageError, match=r"step 2: the loop's body reads net\.features"):
        loop_with(catching)


def test_what_is_only_shown_is_left_alone_and_changes_no_bit():
    """Shapes, texts, copies, files and lists."""
    said = list[str]()
    assert loop_with(show, said=said) == loop_with(lambda _sink, _step: None)
    assert said == []


def into_number(sink, _step):
    sink.shown.append(sink.net.parts["loss"].item())


def own_number(sink, _step):
    sink.shown.append(sink.net.last_loss)


def test_what_becomes_a_number_is_named_once():
    """Whether it is only printed cannot be known."""
    said = list[str]()
    loop_with(into_number, said=said)
    assert len(said) == 1
    assert "the loop reads net.parts['loss'], which" in said[0]


def test_a_number_that_the_loop_mentions_is_named_once():
    net, said = Net(), list[str]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    training = Training(ALONE, {"net": net, "optimizer": optimizer}, looks=True, audits=False)
    for step in training.steps():
        step.mean_loss(net.loss_of)
        if net.last_loss < 0.1:
            optimizer.param_groups[0]["lr"] /= 2
        optimizer.step()
        said.append(training.parts.contract.end_step())
    assert "the loop reads net.last_loss, which" in said[0]
    assert "lost where a process restarts in between" in said[0]
    assert not any(said[1:])


def leaves_late(net, step, batch):
    """A memory of the newest features, from step 3 on."""
    loss = net.loss_of(batch)
    if step.number >= 3:
        net.newest = net.features.detach().mean(0)
    return loss


def reads_late(net, step, batch):
    weight = net.last_loss if step.number >= 3 else 1.0
    return weight * F.mse_loss(net.body(batch.data[0]).mean(1), batch.data[0][:, 0])


@pytest.mark.parametrize("late", ["body reads", "second function reads a number"])
def test_what_begins_later_is_found_in_an_audit_of_one_worker(late):
    """The code of the functions is the same as in the first step; another branch of it runs."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    training = Training(ALONE, {"net": net, "optimizer": optimizer}, looks=True, audits=True)
    refused = r"step 3: .*(reads net\.newest, which|has left behind, in net\.last_loss|net\.last_loss)"

    def train():
        for step in training.steps():
            step.mean_loss(partial(leaves_late, net, step))
            optimizer.step()
            if late == "body reads" and step.number >= 3:
                net.center.lerp_(net.newest, 0.1)
            if late == "second function reads a number":
                step.mean_loss(partial(reads_late, net, step))
                optimizer.step()

    with pytest.raises(UsageError, match=refused):
        train()


def old_decision(sink):
    if sink.net.features.mean() > 0:
        sink.shown.append("large")


def old_center(sink):
    sink.net.center.lerp_(FOUND["features"].mean(0), 0.1)


def old_rate(sink):
    sink.optimizer.param_groups[0]["lr"] = sink.net.logits.detach().std()


def old_in_function(sink):
    sink.kept = sink.net.features.detach().mean()


def old_number(sink):
    sink.shown.append(FOUND["features"].mean().item())


def with_forwards(head, tail, *, said=None, **objects):
    """A forward ends the body of each step; head: begins it, tail: what comes after the forward."""
    torch.manual_seed(0)
    net, inputs = Net(), torch.randn(5, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sink = Sink(net, optimizer)
    sink.kept = 0.0
    objects = {"net": net, "optimizer": optimizer, "values": sink.values} | objects
    training = Training(ALONE, objects, looks=True, audits=False)
    for step in training.steps():
        if step.number > 1:
            head(sink)
        step.mean_loss(lambda batch: net.loss_of(batch) + sink.kept)
        optimizer.step()
        with torch.inference_mode():
            net(inputs)
        tail(sink, step)
        found = training.parts.contract.end_step()
        if said is not None and found:
            said.append(found)
    old_decision(sink)  # after the loop; its last forward has no later step
    return checksum_of(State(**objects).flatten()).whole


def idle(_sink, _step=None):
    pass


@pytest.mark.parametrize(
    ("head", "name", "does"),
    [
        (old_decision, "the loop's body reads net.features", "decides by it"),
        (old_center, "the loop's body reads FOUND['features']", CHANGES),
        (old_rate, "the loop's body reads net.logits", CHANGES),
        (old_in_function, "step.sum reads net.features", "computes with it"),
    ],
)
def test_what_a_forward_of_the_body_leaves_for_the_next_step_is_refused(head, name, does):
    """No State saves it: a process that restarts between the two steps begins without it."""
    with pytest.raises(UsageError, match=r"step 2: .*the loop's body left there in step 1") as error:
        with_forwards(head, idle)
    assert name in str(error.value)
    assert does in str(error.value)


def test_a_number_of_an_earlier_forward_is_named_once_with_what_a_restart_does_to_it():
    said = list[str]()
    with_forwards(old_number, idle, said=said)
    assert len(said) == 1
    assert "reads FOUND['features'], which the loop's body left there in an earlier step" in said[0]
    assert "a process that restarts in between has none" in said[0]


def fresh_features(sink):
    with torch.no_grad():
        sink.net(torch.ones(5, 6))
    old_center(sink)
    old_decision(sink)


def same_step(sink, _step):
    sink.net.center.lerp_(FOUND["features"].clone().mean(0), 0.1)
    sink.values.center = sink.net.features.detach().clone().mean(0)


@pytest.mark.parametrize(
    ("head", "tail"),
    [(fresh_features, idle), (idle, same_step), (lambda sink: show(sink, None), idle)],
    ids=["a forward replaces it", "read in the same step", "only shown"],
)
def test_what_a_forward_leaves_for_its_own_step_is_left_alone(head, tail):
    said = list[str]()
    with_forwards(head, tail, said=said)
    assert said == []


class Newest:
    """Saves what forwards leave in a dict."""

    def state_dict(self):
        return {"features": FOUND.get("features", torch.zeros(0))}

    def load_state_dict(self, state):
        FOUND.update(state)


def test_what_the_state_saves_may_be_of_an_earlier_step():
    with_forwards(lambda sink: sink.shown.append(bool(FOUND["features"].mean() > 0)), idle, newest=Newest())


def test_a_tensor_of_a_module_that_each_call_writes_in_place_is_named_where_the_loop_mentions_it():
    net, said = Net(), list[str]()
    net.usage = torch.zeros(8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    training = Training(ALONE, {"net": net, "optimizer": optimizer}, looks=True, audits=False)

    def function(batch):
        loss = net.loss_of(batch)
        net.usage.copy_(net.features.detach().mean(0))
        return loss

    for step in training.steps():
        step.mean_loss(function)
        optimizer.step()
        net.center.lerp_(net.usage, 0.1)
        said.append(training.parts.contract.end_step())
    assert "the loop reads net.usage, which" in said[0]
    assert not any(said[1:])
