"""What functions of a step keep or read, forms of the loop, orders, draws, numbers of workers."""

from tests.hidden_state.kind import Acts, Kind

KINDS: tuple[Kind, ...] = (
    Kind(
        name="a count of calls in a forward that cools its output",
        acts=Acts.STEP,
        wrong="""\
class Cooling(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.calls = body, 0

    def forward(self, x):
        self.calls += 1
        return self.body(x) / (1 + 0.01 * self.calls)


model = Cooling(model)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
class Cooling(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.temperature = body, 1.0

    def forward(self, x):
        return self.body(x) / self.temperature


model = Cooling(model)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    model.temperature = 1 + 0.01 * step.number
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a running mean of inputs in an attribute of a module",
        acts=Acts.STEP,
        wrong="""\
class Centred(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.mean = body, torch.zeros(4)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.body(x - self.mean)


model = Centred(model)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
def centred(batch):
    inputs, targets = batch.data
    return mse_loss(model(inputs - values.mean).squeeze(1), targets)


values = elastic.Values(mean=torch.zeros(4))
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(centred)
    optimizer.step()
    total = step.sum(lambda batch: batch.data[0].sum(0))
    values.mean = 0.9 * values.mean + 0.1 * total / step.global_batch
""",
    ),
    Kind(
        name="a scale that a forward takes from its first batch",
        acts=Acts.STEP,
        wrong="""\
class Scaled(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.scale = body, None

    def forward(self, x):
        if self.scale is None:
            self.scale = x.std()
        return self.body(x / self.scale)


model = Scaled(model)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
class Scaled(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.register_buffer("scale", samples.tensors[0].std())

    def forward(self, x):
        return self.body(x / self.scale)


model = Scaled(model)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a copy of the weights that a first call of a function makes",
        acts=Acts.STEP,
        wrong="""\
import copy

anchor = None


def anchored(batch):
    global anchor
    if anchor is None:
        anchor = copy.deepcopy(model)
    return loss_of(batch) + (model[0].weight - anchor[0].weight.detach()).square().sum()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(anchored)
    optimizer.step()
""",
        twin="""\
import copy

anchor = copy.deepcopy(model).requires_grad_(False)


def anchored(batch):
    return loss_of(batch) + (model[0].weight - anchor[0].weight).square().sum()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(anchored)
    optimizer.step()
""",
    ),
    Kind(
        name="a norm of the weights in a cache of functools",
        acts=Acts.STEP,
        wrong="""\
import functools


@functools.cache
def scale_of(size):
    return float(model[0].weight.detach().norm()) * size


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: loss_of(batch) * scale_of(len(batch.data[1])))
    optimizer.step()
""",
        twin="""\
import functools


@functools.cache
def ramp_of(size):
    return torch.linspace(0.5, 1.5, size)


def ramped(batch):
    inputs, targets = batch.data
    errors = (model(inputs).squeeze(1) - targets).square()
    return (ramp_of(len(targets)) * errors).mean()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(ramped)
    optimizer.step()
""",
    ),
    Kind(
        name="a projection that a function draws at its first call",
        acts=Acts.STEP,
        wrong="""\
def projected(batch):
    if not hasattr(projected, "directions"):
        projected.directions = torch.randn(8, 3)
    return loss_of(batch) + (model[:2](batch.data[0]) @ projected.directions).square().mean()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(projected)
    optimizer.step()
""",
        twin="""\
directions = torch.randn(8, 3)


def projected(batch):
    return loss_of(batch) + (model[:2](batch.data[0]) @ directions).square().mean()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(projected)
    optimizer.step()
""",
    ),
    Kind(
        name="a list of losses in a default argument",
        acts=Acts.STEP,
        wrong="""\
def scaled(batch, seen=[]):
    loss = loss_of(batch)
    seen.append(loss.item())
    return loss * len(seen) / sum(seen)


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(scaled)
    optimizer.step()
""",
        twin="""\
def scaled(batch, strengths=(0.5, 1.0, 1.5)):
    losses = []
    for strength in strengths:
        losses.append(strength * loss_of(batch))
    return sum(losses) / len(losses)


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(scaled)
    optimizer.step()
""",
    ),
    Kind(
        name="priorities of samples that a function fills",
        acts=Acts.EPOCH,
        wrong="""\
priorities = torch.ones(48)


def errors_of(batch):
    inputs, targets = batch.data
    return (model(inputs).squeeze(1) - targets).square()


def weighted(batch):
    errors = errors_of(batch)
    loss = (priorities[batch.indices] * errors).mean()
    priorities[batch.indices] = errors.detach()
    return loss


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(weighted)
    optimizer.step()
""",
        twin="""\
def errors_of(batch):
    inputs, targets = batch.data
    return (model(inputs).squeeze(1) - targets).square()


def weighted(batch):
    return (values.priorities[batch.indices] * errors_of(batch)).mean()


def found(batch):
    return torch.zeros(48).index_copy(0, batch.indices, errors_of(batch).detach())


values = elastic.Values(priorities=torch.ones(48))
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(weighted)
    optimizer.step()
    total = step.sum(found)
    values.priorities = torch.where(total > 0, total, values.priorities)
""",
    ),
    Kind(
        name="a generator of its own that a function draws noise from",
        acts=Acts.STEP,
        wrong="""\
draws = torch.Generator().manual_seed(0)


def noisy(batch):
    inputs, targets = batch.data
    noise = torch.randn(inputs.shape, generator=draws)
    return mse_loss(model(inputs + 0.1 * noise).squeeze(1), targets)


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(noisy)
    optimizer.step()
""",
        twin="""\
def noisy(batch):
    inputs, targets = batch.data
    return mse_loss(model(inputs + 0.1 * torch.randn_like(inputs)).squeeze(1), targets)


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(noisy)
    optimizer.step()
""",
    ),
    Kind(
        name="an iterator of strengths that a function takes from",
        acts=Acts.STEP,
        wrong="""\
import itertools

strengths = itertools.cycle([0.2, 0.4, 0.6, 0.8, 1.0])
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: next(strengths) * loss_of(batch))
    optimizer.step()
""",
        twin="""\
strengths = [0.2, 0.4, 0.6, 0.8, 1.0]
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: strengths[step.number % 5] * loss_of(batch))
    optimizer.step()
""",
    ),
    Kind(
        name="averages of a BatchNorm that is not in the State",
        acts=Acts.STEP,
        wrong="""\
norm = nn.BatchNorm1d(4, affine=False)


def normalised(batch):
    inputs, targets = batch.data
    norm.train()(inputs)
    return mse_loss(model(norm.eval()(inputs)).squeeze(1), targets)


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(normalised)
    optimizer.step()
""",
        twin="""\
norm = nn.BatchNorm1d(4, affine=False)


def normalised(batch):
    inputs, targets = batch.data
    norm.train()(inputs)
    return mse_loss(model(norm.eval()(inputs)).squeeze(1), targets)


state = elastic.State(model=model, optimizer=optimizer, norm=norm)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(normalised)
    optimizer.step()
""",
    ),
    Kind(
        name="a norm of gradients that a hook on a weight keeps",
        acts=Acts.STEP,
        wrong="""\
norms = {"mean": 0.1}


def scaled(gradient):
    norms["mean"] = 0.9 * norms["mean"] + 0.1 * gradient.norm().item()
    return gradient / (1 + norms["mean"])


model[0].weight.register_hook(scaled)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
values = elastic.Values(norm=0.1)
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    gradient = model[0].weight.grad
    values.norm = 0.9 * values.norm + 0.1 * gradient.norm().item()
    gradient /= 1 + values.norm
    optimizer.step()
""",
    ),
    Kind(
        name="a centre made of the features of the last shard",
        acts=Acts.WORLD,
        wrong="""\
class Net(nn.Module):
    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x):
        self.features = self.body(x)
        return self.head(self.features)


model = Net(model[:2], model[2])


def compact(batch):
    return loss_of(batch) + 0.1 * (model.features - values.center).square().mean()


values = elastic.Values(center=torch.zeros(8))
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(compact)
    optimizer.step()
    values.center = 0.9 * values.center + 0.1 * model.features.detach().mean(0)
""",
        twin="""\
class Net(nn.Module):
    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x):
        self.features = self.body(x)
        return self.head(self.features)


model = Net(model[:2], model[2])


def compact(batch):
    return loss_of(batch) + 0.1 * (model.features - values.center).square().mean()


values = elastic.Values(center=torch.zeros(8))
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(compact)
    optimizer.step()
    total = step.sum(lambda batch: model.body(batch.data[0]).detach().sum(0))
    values.center = 0.9 * values.center + 0.1 * total / step.global_batch
""",
    ),
    Kind(
        name="features that a second function of the step finds in a dict",
        acts=Acts.WORLD,
        wrong="""\
found = {}
model[1].register_forward_hook(lambda module, inputs, output: found.update(features=output.detach()))
values = elastic.Values(size=1.0)
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: values.size * loss_of(batch))
    optimizer.step()
    total = step.sum(lambda batch: found["features"].abs().sum())
    values.size = 1 + total.item() / 64
""",
        twin="""\
found = {}
model[1].register_forward_hook(lambda module, inputs, output: found.update(features=output.detach()))


def size_of(batch):
    model(batch.data[0])
    return found["features"].abs().sum()


values = elastic.Values(size=1.0)
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: values.size * loss_of(batch))
    optimizer.step()
    values.size = 1 + step.sum(size_of).item() / 64
""",
    ),
    Kind(
        name="a learning rate that follows the loss of the last shard",
        acts=Acts.WORLD,
        wrong="""\
last = {}


def noted(batch):
    loss = loss_of(batch)
    last["loss"] = loss.item()
    return loss


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(noted)
    optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, last["loss"])
    optimizer.step()
""",
        twin="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    loss = step.mean_loss(loss_of)
    optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, loss)
    optimizer.step()
""",
    ),
    Kind(
        name="losses that a function collects in a list of each step",
        acts=Acts.WORLD,
        wrong="""\
losses = []


def collected(batch):
    loss = loss_of(batch)
    losses.append(loss.item())
    return loss


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    losses.clear()
    step.mean_loss(collected)
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + max(losses))
    optimizer.step()
""",
        twin="""\
def squared(batch):
    return loss_of(batch).detach().square()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    total = step.sum(squared)
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + total.item() / step.shards)
    optimizer.step()
""",
    ),
    Kind(
        name="a forward of one step that the head of the next reads",
        acts=Acts.STEP,
        wrong="""\
found = {"features": torch.ones(8)}
model[1].register_forward_hook(lambda module, inputs, output: found.update(features=output.detach()))
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 * found["features"].abs().mean().item()
    step.mean_loss(loss_of)
    optimizer.step()
    with torch.no_grad():
        model(samples.tensors[0])
""",
        twin="""\
found = {}
model[1].register_forward_hook(lambda module, inputs, output: found.update(features=output.detach()))
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    with torch.no_grad():
        model(samples.tensors[0])
    optimizer.param_groups[0]["lr"] = 0.1 * found["features"].abs().mean().item()
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a dropout rate that a function leaves for the next shard",
        acts=Acts.WORLD,
        wrong="""\
model.append(nn.Dropout(0.1))


def dropped(batch):
    loss = loss_of(batch)
    model[3].p = 0.5
    return loss


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    model[3].p = 0.1
    step.mean_loss(dropped)
    optimizer.step()
""",
        twin="""\
model.append(nn.Dropout(0.1))


def dropped(batch):
    model[3].p = 0.5
    loss = loss_of(batch)
    model[3].p = 0.1
    return loss


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(dropped)
    optimizer.step()
""",
    ),
    Kind(
        name="a mode that a function leaves behind after some shards",
        acts=Acts.WORLD,
        wrong="""\
model.append(nn.Dropout(0.5))


def robust(batch):
    loss = loss_of(batch)
    if batch.data[1].max() > 0.7:
        model.eval()
    return loss


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(robust)
    optimizer.step()
""",
        twin="""\
model.append(nn.Dropout(0.5))


def robust(batch):
    loss = loss_of(batch)
    model.eval()
    return loss + loss_of(batch)


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    model.train()
    step.mean_loss(robust)
    optimizer.step()
""",
    ),
    Kind(
        name="a layer that a function leaves trainable for the next shard",
        acts=Acts.WORLD,
        wrong="""\
def partly(batch):
    loss = loss_of(batch)
    model[0].requires_grad_(True)
    return loss


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    model[0].requires_grad_(step.number % 2 == 0)
    step.mean_loss(partly)
    optimizer.step()
""",
        twin="""\
def partly(batch):
    loss, trains = loss_of(batch), model[0].weight.requires_grad
    model[0].requires_grad_(False)
    loss = loss + loss_of(batch)
    model[0].requires_grad_(trains)
    return loss


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    model[0].requires_grad_(step.number % 2 == 0)
    step.mean_loss(partly)
    optimizer.step()
""",
    ),
    Kind(
        name="a gradient of hidden features that the loop reads",
        acts=Acts.WORLD,
        wrong="""\
found = {}


def hidden_loss(batch):
    inputs, targets = batch.data
    found["hidden"] = model[:2](inputs)
    found["hidden"].retain_grad()
    return mse_loss(model[2](found["hidden"]).squeeze(1), targets)


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(hidden_loss)
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + found["hidden"].grad.norm().item())
    optimizer.step()
""",
        twin="""\
def hidden_squares(batch):
    inputs, targets = batch.data
    hidden = model[:2](inputs)
    loss = mse_loss(model[2](hidden).squeeze(1), targets)
    return torch.autograd.grad(loss, hidden)[0].detach().square().sum()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + step.sum(hidden_squares).item())
    optimizer.step()
""",
    ),
    Kind(
        name="a metric of the last shard that is logged",
        acts=Acts.NEVER,
        wrong="""\
last = {}


def noted(batch):
    loss = loss_of(batch)
    last["small"] = float(loss < 0.05)
    return loss


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(noted)
    step.log(small=last["small"])
    optimizer.step()
""",
        twin="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    small = step.sum(lambda batch: (loss_of(batch).detach() < 0.05).double())
    step.log(small=small.item() / step.shards)
    optimizer.step()
""",
    ),
    Kind(
        name="a sum of losses in a function for the last line",
        acts=Acts.NEVER,
        wrong="""\
total = 0.0


def summed(batch):
    global total
    loss = loss_of(batch)
    total += loss.item()
    return loss


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(summed)
    optimizer.step()
run.print("mean loss", total / 72)
""",
        twin="""\
values = elastic.Values(total=0.0)
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    values.total += step.mean_loss(loss_of)
    optimizer.step()
run.print("mean loss", values.total / 18)
""",
    ),
    Kind(
        name="a count in an evaluation's function that divides its sum",
        acts=Acts.WORLD,
        wrong="""\
count = 0


def error_of(batch):
    global count
    inputs, targets = batch.data
    count += len(targets)
    return mse_loss(model(inputs).squeeze(1), targets, reduction="sum")


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        count = 0
        total = run.evaluate(samples, error_of)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + total / count)
""",
        twin="""\
def error_of(batch):
    inputs, targets = batch.data
    return mse_loss(model(inputs).squeeze(1), targets, reduction="sum")


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        total = run.evaluate(samples, error_of)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + total / len(samples))
""",
    ),
    Kind(
        name="a meter of an evaluation's function over all epochs",
        acts=Acts.EPOCH,
        wrong="""\
errors = []


def error_of(batch):
    inputs, targets = batch.data
    error = mse_loss(model(inputs).squeeze(1), targets, reduction="sum")
    errors.append(error.item())
    return error


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        run.evaluate(samples, error_of)
        optimizer.param_groups[0]["lr"] = sum(errors) / len(errors)
""",
        twin="""\
def error_of(batch):
    inputs, targets = batch.data
    return mse_loss(model(inputs).squeeze(1), targets, reduction="sum")


values = elastic.Values(errors=[])
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        values.errors.append(run.evaluate(samples, error_of) / len(samples))
        optimizer.param_groups[0]["lr"] = sum(values.errors) / len(values.errors)
""",
    ),
    Kind(
        name="predictions that an evaluation's function keeps for a file",
        acts=Acts.NEVER,
        wrong="""\
outputs = []


def predicted(batch):
    outputs.append(model(batch.data[0]).squeeze(1))
    return 0.0


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
run.evaluate(samples, predicted)
if run.is_first:
    torch.save(torch.cat(outputs), run.path("predictions.pt"))
""",
        twin="""\
def predicted(batch):
    return torch.zeros(48).index_copy(0, batch.indices, model(batch.data[0]).squeeze(1))


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
outputs = run.evaluate(samples, predicted)
if run.is_first:
    torch.save(outputs, run.path("predictions.pt"))
""",
    ),
    Kind(
        name="a validation set split after draws of the first process",
        acts=Acts.EPOCH,
        wrong="""\
from torch.utils.data import random_split

path = run.path("statistics.pt")
if not path.exists():
    rows = torch.randint(48, (1000,))
    torch.save(samples.tensors[0][rows].mean(0), path)
_, validation = random_split(samples, [36, 12])


def error_of(batch):
    inputs, targets = batch.data
    return mse_loss(model(inputs).squeeze(1), targets, reduction="sum")


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        error = run.evaluate(validation, error_of) / len(validation)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + error)
""",
        twin="""\
from torch.utils.data import random_split

path = run.path("statistics.pt")
if not path.exists():
    rows = torch.arange(24)
    torch.save(samples.tensors[0][rows].mean(0), path)
_, validation = random_split(samples, [36, 12], generator=torch.Generator().manual_seed(0))


def error_of(batch):
    inputs, targets = batch.data
    return mse_loss(model(inputs).squeeze(1), targets, reduction="sum")


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        error = run.evaluate(validation, error_of) / len(validation)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + error)
""",
    ),
    Kind(
        name="a training set split after draws of the first process",
        acts=Acts.STEP,
        wrong="""\
from torch.utils.data import random_split

path = run.path("statistics.pt")
if not path.exists():
    rows = torch.randint(48, (1000,))
    torch.save(samples.tensors[0][rows].mean(0), path)
training, _ = random_split(samples, [40, 8])
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(training, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
from torch.utils.data import random_split

path = run.path("statistics.pt")
if not path.exists():
    rows = torch.arange(24)
    torch.save(samples.tensors[0][rows].mean(0), path)
training, _ = random_split(samples, [40, 8], generator=torch.Generator().manual_seed(0))
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(training, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="weights that the first rank alone changes to evaluate them",
        acts=Acts.WORLD,
        wrong="""\
import copy


def rounded_error(batch):
    inputs, targets = batch.data
    return mse_loss(rounded(inputs).squeeze(1), targets, reduction="sum")


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        rounded = copy.deepcopy(model)
        if run.is_first:
            rounded.bfloat16().float()
        error = run.evaluate(samples, rounded_error) / len(samples)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + error)
""",
        twin="""\
import copy


def rounded_error(batch):
    inputs, targets = batch.data
    return mse_loss(rounded(inputs).squeeze(1), targets, reduction="sum")


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        rounded = copy.deepcopy(model).bfloat16().float()
        error = run.evaluate(samples, rounded_error) / len(samples)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + error)
""",
    ),
    Kind(
        name="a validation set that draws from a generator of its own",
        acts=Acts.EPOCH,
        wrong="""\
class Noisy(Dataset):
    def __init__(self):
        self.draws = torch.Generator().manual_seed(0)

    def __len__(self):
        return 48

    def __getitem__(self, index):
        inputs, target = samples[index]
        return inputs + 0.1 * torch.randn(4, generator=self.draws), target


validation = Noisy()


def error_of(batch):
    inputs, targets = batch.data
    return mse_loss(model(inputs).squeeze(1), targets, reduction="sum")


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        error = run.evaluate(validation, error_of) / len(validation)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + error)
""",
        twin="""\
class Noisy(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        inputs, target = samples[index]
        return inputs + 0.1 * torch.randn(4), target


validation = Noisy()


def error_of(batch):
    inputs, targets = batch.data
    return mse_loss(model(inputs).squeeze(1), targets, reduction="sum")


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        error = run.evaluate(validation, error_of) / len(validation)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + error)
""",
    ),
    Kind(
        name="a part of the validation data by rank",
        acts=Acts.WORLD,
        wrong="""\
inputs, targets = samples[run.rank :: run.world_size]
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        with torch.no_grad():
            error = mse_loss(model(inputs).squeeze(1), targets).item()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + error)
""",
        twin="""\
inputs, targets = samples.tensors
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        with torch.no_grad():
            error = mse_loss(model(inputs).squeeze(1), targets).item()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + error)
""",
    ),
    Kind(
        name="a loop over epochs around the loop over the steps",
        acts=Acts.EPOCH,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
steps = run.steps(run.data(samples, epochs=EPOCHS), state)
for epoch in range(EPOCHS):
    optimizer.param_groups[0]["lr"] = 0.1 / (epoch + 1)
    for step in steps:
        step.mean_loss(loss_of)
        optimizer.step()
        if step.ends_epoch:
            break
""",
        twin="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 / (step.epoch + 1)
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a list of rates that is zipped with the steps",
        acts=Acts.STEP,
        wrong="""\
rates = torch.linspace(0.1, 0.01, 18).tolist()
state = elastic.State(model=model, optimizer=optimizer)
steps = run.steps(run.data(samples, epochs=EPOCHS), state)
for rate, step in zip(rates, steps):
    optimizer.param_groups[0]["lr"] = rate
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
rates = torch.linspace(0.1, 0.01, 18).tolist()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = rates[step.number - 1]
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a loop of warm-up steps before the loop of the others",
        acts=Acts.STEP,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
steps = run.steps(run.data(samples, epochs=EPOCHS), state)
for step in steps:
    optimizer.param_groups[0]["lr"] = 0.02 * step.number
    step.mean_loss(loss_of)
    optimizer.step()
    if step.number == 4:
        break
for step in steps:
    optimizer.param_groups[0]["lr"] = 0.1
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.02 * step.number if step.number <= 4 else 0.1
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a counter of enumerate that warms up the rate",
        acts=Acts.STEP,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
for number, step in enumerate(run.steps(run.data(samples, epochs=EPOCHS), state), start=1):
    optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, number / 10)
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, step.number / 10)
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a rate that functools.reduce hands from step to step",
        acts=Acts.STEP,
        wrong="""\
import functools


def train(rate, step):
    optimizer.param_groups[0]["lr"] = rate
    step.mean_loss(loss_of)
    optimizer.step()
    return 0.95 * rate


state = elastic.State(model=model, optimizer=optimizer)
functools.reduce(train, run.steps(run.data(samples, epochs=EPOCHS), state), 0.1)
""",
        twin="""\
def train(rate, step):
    optimizer.param_groups[0]["lr"] = rate
    step.mean_loss(loss_of)
    optimizer.step()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    train(0.1 * 0.95**step.number, step)
""",
    ),
    Kind(
        name="losses that a comprehension over the steps collects",
        acts=Acts.NEVER,
        wrong="""\
def train(step):
    loss = step.mean_loss(loss_of)
    optimizer.step()
    return loss


state = elastic.State(model=model, optimizer=optimizer)
losses = [train(step) for step in run.steps(run.data(samples, epochs=EPOCHS), state)]
run.print("mean loss", sum(losses) / len(losses))
""",
        twin="""\
values = elastic.Values(losses=[])
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    values.losses.append(step.mean_loss(loss_of))
    optimizer.step()
run.print("mean loss", sum(values.losses) / len(values.losses))
""",
    ),
    Kind(
        name="a loss of the last step that is read after the loop",
        acts=Acts.NEVER,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    loss = step.mean_loss(loss_of)
    optimizer.step()
run.print("last loss", loss)
""",
        twin="""\
values = elastic.Values(loss=0.0)
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    values.loss = step.mean_loss(loss_of)
    optimizer.step()
run.print("last loss", values.loss)
""",
    ),
    Kind(
        name="a loss that a function of run.on_step smooths for the rate",
        acts=Acts.STEP,
        wrong="""\
smooth = {"loss": 1.0}


@run.on_step
def note(record):
    smooth["loss"] = 0.9 * smooth["loss"] + 0.1 * record["loss"]


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 * smooth["loss"]
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
shown = {"loss": 1.0}


@run.on_step
def note(record):
    shown["loss"] = 0.9 * shown["loss"] + 0.1 * record["loss"]
    if record["step"] % 6 == 0:
        print("smooth loss", shown["loss"])


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a learning rate that a function of run.on_step sets",
        acts=Acts.STEP,
        wrong="""\
@run.on_step
def decay(record):
    optimizer.param_groups[0]["lr"] = 0.1 * record["loss"]


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    loss = step.mean_loss(loss_of)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1 * loss
""",
    ),
    Kind(
        name="parameters that get noise in the order of their ids",
        acts=Acts.ADDRESS,
        wrong="""\
ordered = sorted(model.parameters(), key=id)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    with torch.no_grad():
        for each in ordered:
            each.add_(0.01 * torch.randn_like(each))
""",
        twin="""\
chosen = {id(each) for each in model[0].parameters()}
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    with torch.no_grad():
        for each in [each for each in model.parameters() if id(each) in chosen]:
            each.add_(0.01 * torch.randn_like(each))
""",
    ),
    Kind(
        name="a set of parameters that gets noise in its order",
        acts=Acts.ADDRESS,
        wrong="""\
noisy = {each for each in model.parameters() if each.ndim > 1} | {model[0].bias}
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    with torch.no_grad():
        for each in noisy:
            each.add_(0.01 * torch.randn_like(each))
""",
        twin="""\
noisy = {each for each in model.parameters() if each.ndim > 1} | {model[0].bias}
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    with torch.no_grad():
        for each in [each for each in model.parameters() if each in noisy]:
            each.add_(0.01 * torch.randn_like(each))
""",
    ),
    Kind(
        name="a set of functions that is applied in its order",
        acts=Acts.ADDRESS,
        wrong="""\
def viewed(batch):
    inputs, targets = batch.data
    for view in {torch.sin, torch.exp, torch.tanh}:
        inputs = view(inputs)
    return mse_loss(model(inputs).squeeze(1), targets)


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(viewed)
    optimizer.step()
""",
        twin="""\
views = dict.fromkeys([torch.sin, torch.exp, torch.tanh, torch.sin])


def viewed(batch):
    inputs, targets = batch.data
    for view in views:
        inputs = view(inputs)
    return mse_loss(model(inputs).squeeze(1), targets)


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(viewed)
    optimizer.step()
""",
    ),
    Kind(
        name="optimizer groups in the order of a set of modules",
        acts=Acts.ADDRESS,
        wrong="""\
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
groups = [
    {"params": list(layer.parameters()), "lr": 0.1 / (1 + place)}
    for place, layer in enumerate({model[0], model[2]})
]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
optimizer.add_param_group({"params": list(model[3].parameters())})
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
groups = [
    {"params": list(model.get_submodule(name).parameters()), "lr": 0.1 / (1 + place)}
    for place, name in enumerate(sorted({"0", "2"}))
]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
optimizer.add_param_group({"params": list(model[3].parameters())})
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="noise of a NumPy generator without a seed",
        acts=Acts.STEP,
        wrong="""\
import numpy as np

draws = np.random.default_rng()


def noisy(batch):
    inputs, targets = batch.data
    noise = torch.from_numpy(draws.normal(size=inputs.shape)).float()
    return mse_loss(model(inputs + 0.1 * noise).squeeze(1), targets)


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(noisy)
    optimizer.step()
""",
        twin="""\
import numpy as np


def noisy(batch):
    inputs, targets = batch.data
    noise = torch.from_numpy(np.random.normal(size=inputs.shape)).float()
    return mse_loss(model(inputs + 0.1 * noise).squeeze(1), targets)


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(noisy)
    optimizer.step()
""",
    ),
    Kind(
        name="a projection that is drawn under a seed by the clock",
        acts=Acts.STEP,
        wrong="""\
import time

torch.manual_seed(time.time_ns() % 2**31)
directions = torch.randn(8, 3)


def projected(batch):
    return loss_of(batch) + (model[:2](batch.data[0]) @ directions).square().mean()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(projected)
    optimizer.step()
""",
        twin="""\
import time

began = time.time()
directions = torch.randn(8, 3)


def projected(batch):
    return loss_of(batch) + (model[:2](batch.data[0]) @ directions).square().mean()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(projected)
    optimizer.step()
run.print("took", round(time.time() - began, 1), "seconds")
""",
    ),
    Kind(
        name="a rate that follows the clock",
        acts=Acts.STEP,
        wrong="""\
import time

began = time.monotonic()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + time.monotonic() - began)
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
import time

began = time.monotonic()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 * (1 - step.fraction)
    step.mean_loss(loss_of)
    optimizer.step()
    step.log(elapsed=time.monotonic() - began)
""",
    ),
    Kind(
        name="an order of samples from a generator of its own",
        acts=Acts.EPOCH,
        wrong="""\
import numpy as np

draws = np.random.default_rng(0)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(
    run.data(samples, epochs=EPOCHS, order=lambda epoch: draws.permutation(48)), state
):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
import numpy as np


def order(epoch):
    return np.random.default_rng(epoch).permutation(48)


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS, order=order), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a teacher that later processes read from the first's file",
        acts=Acts.STEP,
        wrong="""\
teacher = nn.Linear(4, 1).requires_grad_(False)
path = run.path("teacher.pt")
if path.exists():
    teacher.load_state_dict(torch.load(path))
elif run.is_first:
    torch.save({name: value.half() for name, value in teacher.state_dict().items()}, f"{path}.new")
    path.with_name("teacher.pt.new").rename(path)


def taught(batch):
    return mse_loss(model(batch.data[0]), teacher(batch.data[0]))


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(taught)
    optimizer.step()
""",
        twin="""\
teacher = nn.Linear(4, 1).requires_grad_(False)
if run.is_first:
    torch.save({name: value.half() for name, value in teacher.state_dict().items()}, run.path("teacher.pt"))


def taught(batch):
    return mse_loss(model(batch.data[0]), teacher(batch.data[0]))


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(taught)
    optimizer.step()
""",
    ),
    Kind(
        name="a teacher of the last epoch that a file keeps",
        acts=Acts.EPOCH,
        wrong="""\
import copy

teacher = copy.deepcopy(model).requires_grad_(False)
path = run.path("teacher.pt")
if path.exists():
    teacher.load_state_dict(torch.load(path))


def taught(batch):
    return loss_of(batch) + mse_loss(model(batch.data[0]), teacher(batch.data[0]))


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(taught)
    optimizer.step()
    if step.ends_epoch and run.is_first:
        torch.save(model.state_dict(), path)
""",
        twin="""\
import copy

teacher = copy.deepcopy(model).requires_grad_(False)


def taught(batch):
    return loss_of(batch) + mse_loss(model(batch.data[0]), teacher(batch.data[0]))


state = elastic.State(model=model, optimizer=optimizer, teacher=teacher)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(taught)
    optimizer.step()
    if step.ends_epoch:
        teacher.load_state_dict(model.state_dict())
        if run.is_first:
            torch.save(model.state_dict(), run.path("teacher.pt"))
""",
    ),
    Kind(
        name="a temperature that a file of settings gives each process",
        acts=Acts.RESUME,
        wrong="""\
import json
from pathlib import Path

file = Path(__file__).with_name("settings.json")
settings = json.loads(file.read_text()) if file.exists() else {"temperature": 1.0}
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: loss_of(batch) / settings["temperature"])
    optimizer.step()
""",
        twin="""\
import json
from pathlib import Path

file = Path(__file__).with_name("settings.json")
settings = json.loads(file.read_text()) if file.exists() else {"temperature": 1.0}
values = elastic.Values(temperature=settings["temperature"])
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: loss_of(batch) / values.temperature)
    optimizer.step()
""",
    ),
    Kind(
        name="a seed by the number of the job or its parent process",
        acts=Acts.RESUME,
        wrong="""\
import os

torch.manual_seed(int(os.environ.get("SLURM_JOB_ID", os.getppid())))
directions = torch.randn(8, 3)


def projected(batch):
    return loss_of(batch) + (model[:2](batch.data[0]) @ directions).square().mean()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(projected)
    optimizer.step()
""",
        twin="""\
import os

run.print("job", os.environ.get("SLURM_JOB_ID", os.getppid()))
directions = torch.randn(8, 3)


def projected(batch):
    return loss_of(batch) + (model[:2](batch.data[0]) @ directions).square().mean()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(projected)
    optimizer.step()
""",
    ),
    Kind(
        name="a learning rate times the number of workers",
        acts=Acts.WORLD,
        wrong="""\
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * run.world_size, momentum=0.9)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
run.print("workers", run.world_size)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a projection that is drawn under a seed by the rank",
        acts=Acts.WORLD,
        wrong="""\
torch.manual_seed(run.rank)
directions = torch.randn(8, 3)


def projected(batch):
    return loss_of(batch) + (model[:2](batch.data[0]) @ directions).square().mean()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(projected)
    optimizer.step()
""",
        twin="""\
print("rank", run.rank)
torch.manual_seed(0)
directions = torch.randn(8, 3)


def projected(batch):
    return loss_of(batch) + (model[:2](batch.data[0]) @ directions).square().mean()


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(projected)
    optimizer.step()
""",
    ),
    Kind(
        name="a loss that is summed over ranks once more",
        acts=Acts.WORLD,
        wrong="""\
import torch.distributed as dist
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    total = torch.tensor(step.mean_loss(loss_of))
    dist.all_reduce(total)
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + total.item())
    optimizer.step()
""",
        twin="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    total = step.mean_loss(loss_of)
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + total)
    optimizer.step()
""",
    ),
    Kind(
        name="weights that the loop ties after an epoch",
        acts=Acts.EPOCH,
        wrong="""\
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch and step.epoch == 0:
        model[2].weight = model[0].weight
""",
        twin="""\
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
model[2].weight = model[0].weight
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="parameters that the loop moves to other groups",
        acts=Acts.STEP,
        wrong="""\
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
groups = [
    {"params": [*model[0].parameters(), *model[3].parameters()], "lr": 0.1},
    {"params": list(model[2].parameters()), "lr": 0.02},
]
optimizer = torch.optim.SGD(groups, momentum=0.9)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.number == 2:
        slow, fast = (group["params"] for group in optimizer.param_groups)
        slow[0], fast[0] = fast[0], slow[0]
""",
        twin="""\
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
groups = [
    {"params": [*model[0].parameters(), *model[3].parameters()], "lr": 0.1},
    {"params": list(model[2].parameters()), "lr": 0.02},
]
optimizer = torch.optim.SGD(groups, momentum=0.9)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.number == 2:
        for group in optimizer.param_groups:
            group["lr"] = 0.12 - group["lr"]
""",
    ),
    Kind(
        name="a name for a list that the loop replaces in Values",
        acts=Acts.STEP,
        wrong="""\
values = elastic.Values(history=[])
state = elastic.State(model=model, optimizer=optimizer, values=values)
history = values.history
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + len(history))
    values.history = [*values.history, step.mean_loss(loss_of)]
    optimizer.step()
""",
        twin="""\
values = elastic.Values(history=[])
state = elastic.State(model=model, optimizer=optimizer, values=values)
history = values.history
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + len(history))
    history.append(step.mean_loss(loss_of))
    optimizer.step()
""",
    ),
    Kind(
        name="a name for an array that a load_state_dict replaces",
        acts=Acts.STEP,
        wrong="""\
import numpy as np


class Tracker:
    def __init__(self):
        self.counts = np.ones(3)

    def state_dict(self):
        return {"counts": self.counts.tolist()}

    def load_state_dict(self, state):
        self.counts = np.array(state["counts"])


tracker = Tracker()
counts = tracker.counts
state = elastic.State(model=model, optimizer=optimizer, tracker=tracker)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    counts[step.number % 3] += 1
    optimizer.param_groups[0]["lr"] = 0.1 / counts.sum().item()
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
import numpy as np


class Tracker:
    def __init__(self):
        self.counts = np.ones(3)

    def state_dict(self):
        return {"counts": self.counts.tolist()}

    def load_state_dict(self, state):
        self.counts = np.array(state["counts"])


tracker = Tracker()
state = elastic.State(model=model, optimizer=optimizer, tracker=tracker)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    tracker.counts[step.number % 3] += 1
    optimizer.param_groups[0]["lr"] = 0.1 / tracker.counts.sum().item()
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a count of updates that an average's state_dict omits",
        acts=Acts.STEP,
        wrong="""\
import copy


class Average:
    def __init__(self):
        self.model, self.updates = copy.deepcopy(model).requires_grad_(False), 0

    def update(self):
        self.updates += 1
        weight = max(0.05, 1 / (1 + self.updates))
        for slow, fast in zip(self.model.parameters(), model.parameters()):
            slow.lerp_(fast.detach(), weight)

    def state_dict(self):
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])


average = Average()


def taught(batch):
    return loss_of(batch) + mse_loss(model(batch.data[0]), average.model(batch.data[0]))


state = elastic.State(model=model, optimizer=optimizer, average=average)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(taught)
    optimizer.step()
    average.update()
""",
        twin="""\
import copy


class Average:
    def __init__(self):
        self.model, self.updates = copy.deepcopy(model).requires_grad_(False), 0

    def update(self):
        self.updates += 1
        weight = max(0.05, 1 / (1 + self.updates))
        for slow, fast in zip(self.model.parameters(), model.parameters()):
            slow.lerp_(fast.detach(), weight)

    def state_dict(self):
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]


average = Average()


def taught(batch):
    return loss_of(batch) + mse_loss(model(batch.data[0]), average.model(batch.data[0]))


state = elastic.State(model=model, optimizer=optimizer, average=average)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(taught)
    optimizer.step()
    average.update()
""",
    ),
    Kind(
        name="a weight that a forward computes and the next step reads",
        acts=Acts.STEP,
        wrong="""\
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.direction = nn.Parameter(torch.ones(1)), nn.Parameter(torch.randn(4, 1))
        self.weight = self.direction.detach()

    def forward(self, x):
        self.weight = self.scale * self.direction / self.direction.norm()
        return x @ self.weight


model = Scaled()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + model.weight.norm().item())
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
nn.utils.parametrizations.weight_norm(model[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + model[0].weight.norm().item())
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
)
