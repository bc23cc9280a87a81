"""State that the loop keeps: in its variables, objects, modules, datasets, files and settings."""

from tests.hidden_state.kind import Acts, Kind

KINDS: tuple[Kind, ...] = (
    # Variables of the loop.
    Kind(
        name="a counter in a variable that warms the learning rate up",
        acts=Acts.STEP,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
count = 0
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    count += 1
    optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, count / 10)
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
        name="the counter of enumerate in a decaying learning rate",
        acts=Acts.STEP,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
for index, step in enumerate(run.steps(run.data(samples, epochs=EPOCHS), state)):
    step.mean_loss(loss_of)
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + index)
    optimizer.step()
""",
        twin="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    index = step.number - 1
    step.mean_loss(loss_of)
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + index)
    optimizer.step()
""",
    ),
    Kind(
        name="the first loss in a variable that later ones are divided by",
        acts=Acts.STEP,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
first = None
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    loss = step.mean_loss(loss_of)
    if first is None:
        first = loss
    optimizer.param_groups[0]["lr"] = 0.1 * loss / first
    optimizer.step()
""",
        twin="""\
values = elastic.Values(first=None)
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    loss = step.mean_loss(loss_of)
    if values.first is None:
        values.first = loss
    optimizer.param_groups[0]["lr"] = 0.1 * loss / values.first
    optimizer.step()
""",
    ),
    Kind(
        name="a running mean of losses in a variable that scales the loss",
        acts=Acts.STEP,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
mean = 1.0
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    loss = step.mean_loss(lambda batch: loss_of(batch) / mean)
    optimizer.step()
    mean = 0.9 * mean + 0.1 * loss
""",
        twin="""\
values = elastic.Values(mean=1.0)
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    loss = step.mean_loss(lambda batch: loss_of(batch) / values.mean)
    optimizer.step()
    values.mean = 0.9 * values.mean + 0.1 * loss
""",
    ),
    Kind(
        name="a list of gradient norms that sets the limit of clipping",
        acts=Acts.STEP,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
norms = []
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    limit = 0.5 * sum(norms) / len(norms) if norms else 0.1
    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
    optimizer.step()
""",
        twin="""\
values = elastic.Values(norms=[])
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    limit = 0.5 * sum(values.norms) / len(values.norms) if values.norms else 0.1
    values.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
    optimizer.step()
""",
    ),
    Kind(
        name="the number of the newest epoch in a variable",
        acts=Acts.STEP,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
epoch = -1
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    if step.epoch != epoch:
        epoch = step.epoch
        optimizer.state.clear()
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
state = elastic.State(model=model, optimizer=optimizer)
data = run.data(samples, epochs=EPOCHS)
for step in run.steps(data, state):
    if step.number % data.steps_per_epoch == 1:
        optimizer.state.clear()
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a factor in a variable that each epoch's end halves",
        acts=Acts.EPOCH,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
factor = 1.0
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: factor * loss_of(batch))
    optimizer.step()
    if step.ends_epoch:
        factor *= 0.5
""",
        twin="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    factor = 0.5**step.epoch
    step.mean_loss(lambda batch: factor * loss_of(batch))
    optimizer.step()
""",
    ),
    Kind(
        name="a flag in a variable that an epoch's loss sets",
        acts=Acts.EPOCH,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
phase = "warm"
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 if phase == "warm" else 0.02
    loss = step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch and loss < 10:
        phase = "main"
""",
        twin="""\
values = elastic.Values(phase="warm")
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 if values.phase == "warm" else 0.02
    loss = step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch and loss < 10:
        values.phase = "main"
""",
    ),
    Kind(
        name="the best loss and the patience of early stopping",
        acts=Acts.EPOCH,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
best, patience = float("inf"), 0
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        loss = run.evaluate(samples, lambda batch: loss_of(batch) * len(batch.data[1]))
        patience = 0 if loss < 0.1 * best else patience + 1
        best = min(best, loss)
        if patience == 1:
            run.stop("the loss hardly falls")
""",
        twin="""\
values = elastic.Values(best=float("inf"), patience=0)
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        loss = run.evaluate(samples, lambda batch: loss_of(batch) * len(batch.data[1]))
        values.patience = 0 if loss < 0.1 * values.best else values.patience + 1
        values.best = min(values.best, loss)
        if values.patience == 1:
            run.stop("the loss hardly falls")
""",
    ),
    Kind(
        name="a sum over the steps of an epoch that sets the next rate",
        acts=Acts.EPOCH,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
total = 0.0
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    total += step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + total)
        total = 0.0
""",
        twin="""\
values = elastic.Values(total=0.0)
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    values.total += step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + values.total)
        values.total = 0.0
""",
    ),
    Kind(
        name="a variable that names another optimizer from some step on",
        acts=Acts.EPOCH,
        wrong="""\
adam = torch.optim.Adam(model.parameters(), lr=0.01)
state = elastic.State(model=model, optimizer=optimizer, adam=adam)
current = adam
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    current.step()
    if step.ends_epoch:
        current = optimizer
""",
        twin="""\
adam = torch.optim.Adam(model.parameters(), lr=0.01)
state = elastic.State(model=model, optimizer=optimizer, adam=adam)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    current = adam if step.epoch == 0 else optimizer
    step.mean_loss(loss_of)
    current.step()
""",
    ),
    # Printed or saved, and never trained on.
    Kind(
        name="the step of the greatest loss, printed at the end",
        acts=Acts.NEVER,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
worst, hardest = 0.0, None
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    loss = step.mean_loss(loss_of)
    optimizer.step()
    if loss > worst:
        worst, hardest = loss, step.number
run.print(f"greatest loss: {worst} in step {hardest}")
""",
        twin="""\
values = elastic.Values(worst=0.0, hardest=None)
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    loss = step.mean_loss(loss_of)
    optimizer.step()
    if loss > values.worst:
        values.worst, values.hardest = loss, step.number
run.print(f"greatest loss: {values.worst} in step {values.hardest}")
""",
    ),
    Kind(
        name="a list of all losses, printed at the end",
        acts=Acts.NEVER,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
history = []
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    history.append(step.mean_loss(loss_of))
    optimizer.step()
run.print(f"{len(history)} losses, mean {sum(history) / len(history)}")
""",
        twin="""\
values = elastic.Values(history=[])
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    values.history.append(step.mean_loss(loss_of))
    optimizer.step()
run.print(f"{len(values.history)} losses, mean {sum(values.history) / len(values.history)}")
""",
    ),
    Kind(
        name="a meter whose mean each epoch's end prints",
        acts=Acts.NEVER,
        wrong="""\
class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def add(self, value):
        self.total, self.count = self.total + value, self.count + 1


state = elastic.State(model=model, optimizer=optimizer)
meter = Meter()
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    meter.add(step.mean_loss(loss_of))
    optimizer.step()
    if step.ends_epoch:
        run.print(f"epoch {step.epoch}: {meter.total / meter.count}")
        meter = Meter()
""",
        twin="""\
class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def add(self, value):
        self.total, self.count = self.total + value, self.count + 1

    def state_dict(self):
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, saved):
        self.total, self.count = saved["total"], saved["count"]


meter = Meter()
state = elastic.State(model=model, optimizer=optimizer, meter=meter)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    meter.add(step.mean_loss(loss_of))
    optimizer.step()
    if step.ends_epoch:
        run.print(f"epoch {step.epoch}: {meter.total / meter.count}")
        meter.total, meter.count = 0.0, 0
""",
    ),
    Kind(
        name="an average of the weights by hand, saved at the end",
        acts=Acts.NEVER,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    for name, p in model.named_parameters():
        shadow[name].lerp_(p.detach(), 0.1)
if run.is_first:
    torch.save(shadow, run.path("average.pt"))
""",
        twin="""\
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
state = elastic.State(model=model, optimizer=optimizer, average=average)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    average.update_parameters(model)
if run.is_first:
    torch.save(average.module.state_dict(), run.path("average.pt"))
""",
    ),
    Kind(
        name="the best weights in a variable, saved at the end",
        acts=Acts.NEVER,
        wrong="""\
import copy

state = elastic.State(model=model, optimizer=optimizer)
lowest, best = float("inf"), None
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.05 if step.epoch == 0 else 0.3
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        loss = run.evaluate(samples, lambda batch: loss_of(batch) * len(batch.data[1]))
        if loss < lowest:
            lowest, best = loss, copy.deepcopy(model.state_dict())
if run.is_first:
    torch.save(best, run.path("best.pt"))
""",
        twin="""\
import copy

best, values = copy.deepcopy(model), elastic.Values(lowest=float("inf"))
state = elastic.State(model=model, optimizer=optimizer, best=best, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.05 if step.epoch == 0 else 0.3
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        loss = run.evaluate(samples, lambda batch: loss_of(batch) * len(batch.data[1]))
        if loss < values.lowest:
            values.lowest = loss
            best.load_state_dict(model.state_dict())
if run.is_first:
    torch.save(best.state_dict(), run.path("best.pt"))
""",
    ),
    Kind(
        name="a list of former weights, averaged at the end",
        acts=Acts.NEVER,
        wrong="""\
import copy

state = elastic.State(model=model, optimizer=optimizer)
former = []
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        former.append(copy.deepcopy(model.state_dict()))
soup = {name: sum(each[name] for each in former) / len(former) for name in model.state_dict()}
if run.is_first:
    torch.save(soup, run.path("soup.pt"))
""",
        twin="""\
import copy

soup = copy.deepcopy(model)
state = elastic.State(model=model, optimizer=optimizer, soup=soup)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        with torch.no_grad():
            for mean, p in zip(soup.parameters(), model.parameters()):
                mean.lerp_(p, 1 / (step.epoch + 1))
if run.is_first:
    torch.save(soup.state_dict(), run.path("soup.pt"))
""",
    ),
    # Weights, tensors and arrays beside the State.
    Kind(
        name="a teacher that follows the model, in the loss",
        acts=Acts.STEP,
        wrong="""\
import copy

teacher = copy.deepcopy(model).requires_grad_(False)


def distilled(batch):
    return loss_of(batch) + mse_loss(model(batch.data[0]), teacher(batch.data[0]))


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(distilled)
    optimizer.step()
    for slow, fast in zip(teacher.parameters(), model.parameters()):
        slow.lerp_(fast.detach(), 0.1)
""",
        twin="""\
import copy

teacher = copy.deepcopy(model).requires_grad_(False)


def distilled(batch):
    return loss_of(batch) + mse_loss(model(batch.data[0]), teacher(batch.data[0]))


state = elastic.State(model=model, optimizer=optimizer, teacher=teacher)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(distilled)
    optimizer.step()
    for slow, fast in zip(teacher.parameters(), model.parameters()):
        slow.lerp_(fast.detach(), 0.1)
""",
    ),
    Kind(
        name="slow weights in a list that the weights are pulled to",
        acts=Acts.STEP,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
slow = [p.detach().clone() for p in model.parameters()]
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    for kept, p in zip(slow, model.parameters()):
        kept.lerp_(p.detach(), 0.5)
        p.data.copy_(kept)
""",
        twin="""\
values = elastic.Values(slow=[p.detach().clone() for p in model.parameters()])
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    for kept, p in zip(values.slow, model.parameters()):
        kept.lerp_(p.detach(), 0.5)
        p.data.copy_(kept)
""",
    ),
    Kind(
        name="weights of a finished phase that a later one is pulled to",
        acts=Acts.EPOCH,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
anchor = None


def anchored(batch):
    if anchor is None:
        return loss_of(batch)
    return loss_of(batch) + sum(mse_loss(p, a) for p, a in zip(model.parameters(), anchor))


for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(anchored)
    optimizer.step()
    if step.number == 6:
        anchor = [p.detach().clone() for p in model.parameters()]
""",
        twin="""\
import copy

anchor = copy.deepcopy(model).requires_grad_(False)
state = elastic.State(model=model, optimizer=optimizer, anchor=anchor)


def anchored(batch):
    return loss_of(batch) + sum(mse_loss(p, a) for p, a in zip(model.parameters(), anchor.parameters()))


for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of if step.number <= 6 else anchored)
    optimizer.step()
    if step.number == 6:
        anchor.load_state_dict(model.state_dict())
""",
    ),
    Kind(
        name="masks in a dict that an epoch's end prunes by",
        acts=Acts.EPOCH,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
masks = {name: torch.ones_like(p) for name, p in model.named_parameters()}
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        masks = {name: (p.detach().abs() > 0.2).float() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data.mul_(masks[name])
""",
        twin="""\
values = elastic.Values(masks={name: torch.ones_like(p) for name, p in model.named_parameters()})
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        values.masks = {name: (p.detach().abs() > 0.2).float() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data.mul_(values.masks[name])
""",
    ),
    Kind(
        name="momenta in attributes of the parameters",
        acts=Acts.STEP,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
for p in model.parameters():
    p.momentum = torch.zeros_like(p)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    for p in model.parameters():
        p.momentum = 0.9 * p.momentum + p.grad
        p.grad.copy_(p.momentum)
    optimizer.step()
""",
        twin="""\
values = elastic.Values(momenta=[torch.zeros_like(p) for p in model.parameters()])
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    for p, momentum in zip(model.parameters(), values.momenta):
        momentum.mul_(0.9).add_(p.grad)
        p.grad.copy_(momentum)
    optimizer.step()
""",
    ),
    Kind(
        name="a queue of features in a tensor that the loss reads",
        acts=Acts.STEP,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
queue = torch.zeros(4, 8)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: loss_of(batch) + mse_loss(model[0](batch.data[0]).mean(0), queue.mean(0)))
    optimizer.step()
    queue[step.number % 4] = step.sum(lambda batch: model[0](batch.data[0]).detach().sum(0)) / 8
""",
        twin="""\
values = elastic.Values(queue=torch.zeros(4, 8))
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    queue = values.queue
    step.mean_loss(lambda batch: loss_of(batch) + mse_loss(model[0](batch.data[0]).mean(0), queue.mean(0)))
    optimizer.step()
    queue[step.number % 4] = step.sum(lambda batch: model[0](batch.data[0]).detach().sum(0)) / 8
""",
    ),
    Kind(
        name="a buffer of the model that its state_dict leaves out",
        acts=Acts.STEP,
        wrong="""\
model.register_buffer("scale", torch.ones(()), persistent=False)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: model.scale * loss_of(batch))
    optimizer.step()
    model.scale.mul_(0.9)
""",
        twin="""\
model.register_buffer("scale", torch.ones(()))
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: model.scale * loss_of(batch))
    optimizer.step()
    model.scale.mul_(0.9)
""",
    ),
    Kind(
        name="features of the step before in an attribute of a module",
        acts=Acts.STEP,
        wrong="""\
class Probe(nn.Module):
    hidden = None

    def forward(self, inputs):
        self.hidden = model[0](inputs).detach()


probe = Probe()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    if probe.hidden is not None:
        model[0].bias.grad.add_(probe.hidden.mean(0), alpha=0.1)
    optimizer.step()
    probe(samples.tensors[0])
""",
        twin="""\
class Probe(nn.Module):
    hidden = None

    def forward(self, inputs):
        self.hidden = model[0](inputs).detach()


probe = Probe()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    probe(samples.tensors[0])
    step.mean_loss(loss_of)
    model[0].bias.grad.add_(probe.hidden.mean(0), alpha=0.1)
    optimizer.step()
""",
    ),
    # Optimizers, schedules, and what they call.
    Kind(
        name="momenta in a list of an optimizer written by hand",
        acts=Acts.STEP,
        wrong="""\
class Heavy(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.momenta = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for momentum, p in zip(self.momenta, self.param_groups[0]["params"]):
            momentum.mul_(0.9).add_(p.grad)
            p.sub_(0.1 * momentum)


optimizer = Heavy(model.parameters())
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
class Heavy(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.mul_(0.9).add_(p.grad)
            p.sub_(0.1 * momentum)


optimizer = Heavy(model.parameters())
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a count of updates in an attribute of an optimizer",
        acts=Acts.STEP,
        wrong="""\
class Falling(torch.optim.SGD):
    updates = 0

    def step(self, closure=None):
        self.updates += 1
        self.param_groups[0]["lr"] = 0.1 / self.updates
        return super().step(closure)


optimizer = Falling(model.parameters(), lr=0.1)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
class Falling(torch.optim.SGD):
    def step(self, closure=None):
        group = self.param_groups[0]
        group["updates"] = group.get("updates", 0) + 1
        group["lr"] = 0.1 / group["updates"]
        return super().step(closure)


optimizer = Falling(model.parameters(), lr=0.1)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="an average in the State without its count of updates",
        acts=Acts.STEP,
        wrong="""\
class Ema:
    def __init__(self):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    def update(self):
        self.updates += 1
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 9 / (10 + self.updates))

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, saved):
        for name, mean in self.shadow.items():
            mean.copy_(saved[name])


ema = Ema()
state = elastic.State(model=model, optimizer=optimizer, ema=ema)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    ema.update()
""",
        twin="""\
class Ema:
    def __init__(self):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    def update(self):
        self.updates += 1
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 9 / (10 + self.updates))

    def state_dict(self):
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, saved):
        for name, mean in self.shadow.items():
            mean.copy_(saved["shadow"][name])
        self.updates = saved["updates"]


ema = Ema()
state = elastic.State(model=model, optimizer=optimizer, ema=ema)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    ema.update()
""",
    ),
    Kind(
        name="a schedule written by hand outside the State",
        acts=Acts.STEP,
        wrong="""\
class Warmup:
    def __init__(self):
        self.count = 0

    def step(self):
        self.count += 1
        optimizer.param_groups[0]["lr"] = 0.1 / self.count


schedule = Warmup()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    schedule.step()
""",
        twin="""\
class Warmup:
    def __init__(self):
        self.count = 0

    def step(self):
        self.count += 1
        optimizer.param_groups[0]["lr"] = 0.1 / self.count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, saved):
        self.count = saved["count"]


schedule = Warmup()
state = elastic.State(model=model, optimizer=optimizer, schedule=schedule)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    schedule.step()
""",
    ),
    Kind(
        name="a schedule of torch outside the State",
        acts=Acts.STEP,
        wrong="""\
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.9**count)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    schedule.step()
""",
        twin="""\
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.9**count)
state = elastic.State(model=model, optimizer=optimizer, schedule=schedule)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    schedule.step()
""",
    ),
    Kind(
        name="a function of a schedule that counts its calls",
        acts=Acts.STEP,
        wrong="""\
def falling():
    calls = 0

    def factor(epoch):
        nonlocal calls
        calls += 1
        return 1 / calls

    return factor


schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, falling())
state = elastic.State(model=model, optimizer=optimizer, schedule=schedule)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    schedule.step()
""",
        twin="""\
def falling(count):
    return 1 / (1 + count)


schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
state = elastic.State(model=model, optimizer=optimizer, schedule=schedule)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    schedule.step()
""",
    ),
    Kind(
        name="a hook of the optimizer that changes a list",
        acts=Acts.STEP,
        wrong="""\
scales = [1.0]


def shrink(optimizer, *_):
    scales[0] *= 0.9
    optimizer.param_groups[0]["lr"] = 0.1 * scales[0]


optimizer.register_step_post_hook(shrink)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
def shrink(optimizer, *_):
    optimizer.param_groups[0]["lr"] *= 0.9


optimizer.register_step_post_hook(shrink)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    # Iterators and generators.
    Kind(
        name="an iterator over a second data set",
        acts=Acts.STEP,
        wrong="""\
from itertools import cycle

from torch.utils.data import DataLoader

others = cycle(DataLoader(torch.linspace(0, 2, 160).reshape(40, 4), batch_size=8))
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    other = next(others)
    step.mean_loss(lambda batch: loss_of(batch) + model(other).square().mean())
    optimizer.step()
""",
        twin="""\
others = torch.linspace(0, 2, 160).reshape(5, 8, 4)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    other = others[(step.number - 1) % 5]
    step.mean_loss(lambda batch: loss_of(batch) + model(other).square().mean())
    optimizer.step()
""",
    ),
    Kind(
        name="a generator of NumPy's that each step draws from",
        acts=Acts.STEP,
        wrong="""\
import numpy as np

rng = np.random.default_rng(0)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.param_groups[0]["lr"] = rng.uniform(0.05, 0.1)
    optimizer.step()
""",
        twin="""\
import numpy as np

state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    rng = np.random.default_rng([0, step.number])
    step.mean_loss(loss_of)
    optimizer.param_groups[0]["lr"] = rng.uniform(0.05, 0.1)
    optimizer.step()
""",
    ),
    Kind(
        name="a generator of torch's for noise on the gradients",
        acts=Acts.STEP,
        wrong="""\
generator = torch.Generator().manual_seed(0)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    for p in model.parameters():
        p.grad.add_(torch.randn(p.shape, generator=generator), alpha=0.01)
    optimizer.step()
""",
        twin="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    for p in model.parameters():
        p.grad.add_(torch.randn(p.shape), alpha=0.01)
    optimizer.step()
""",
    ),
    Kind(
        name="a generator function that yields the learning rates",
        acts=Acts.STEP,
        wrong="""\
def falling(rate):
    while True:
        yield rate
        rate *= 0.9


rates = falling(0.1)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = next(rates)
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
def falling(rate):
    while True:
        yield rate
        rate *= 0.9


rates = [rate for rate, _ in zip(falling(0.1), range(18))]
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = rates[step.number - 1]
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    # Objects, classes, functions and their defaults.
    Kind(
        name="an attribute of an object that a method lets fall",
        acts=Acts.STEP,
        wrong="""\
class Agent:
    def __init__(self):
        self.eps = 1.0

    def decay(self):
        self.eps *= 0.9


agent = Agent()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: loss_of(batch) + agent.eps * model(batch.data[0]).square().mean())
    optimizer.step()
    agent.decay()
""",
        twin="""\
class Agent:
    def __init__(self):
        self.eps = 1.0


agent = Agent()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    agent.eps = 0.9 ** (step.number - 1)
    step.mean_loss(lambda batch: loss_of(batch) + agent.eps * model(batch.data[0]).square().mean())
    optimizer.step()
""",
    ),
    Kind(
        name="an attribute of a class of settings that the loop changes",
        acts=Acts.STEP,
        wrong="""\
class CFG:
    mix = 1.0


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: CFG.mix * loss_of(batch))
    optimizer.step()
    CFG.mix *= 0.97
""",
        twin="""\
class CFG:
    mix = 1.0


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    mix = CFG.mix * 0.97 ** (step.number - 1)
    step.mean_loss(lambda batch: mix * loss_of(batch))
    optimizer.step()
""",
    ),
    Kind(
        name="a global that a function of the loop changes",
        acts=Acts.STEP,
        wrong="""\
average = 1.0


def smoothed(loss):
    global average
    average = 0.9 * average + 0.1 * loss
    return average


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 * smoothed(step.mean_loss(loss_of))
    optimizer.step()
""",
        twin="""\
values = elastic.Values(average=1.0)


def smoothed(loss):
    values.average = 0.9 * values.average + 0.1 * loss
    return values.average


state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 * smoothed(step.mean_loss(loss_of))
    optimizer.step()
""",
    ),
    Kind(
        name="a default argument that remembers what it was given",
        acts=Acts.STEP,
        wrong="""\
def smoothed(loss, seen=[]):
    seen.append(loss)
    return sum(seen) / len(seen)


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 * smoothed(step.mean_loss(loss_of))
    optimizer.step()
""",
        twin="""\
def smoothed(loss, seen):
    seen.append(loss)
    return sum(seen) / len(seen)


values = elastic.Values(seen=[])
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    optimizer.param_groups[0]["lr"] = 0.1 * smoothed(step.mean_loss(loss_of), values.seen)
    optimizer.step()
""",
    ),
    Kind(
        name="a cache of a function that keeps what it first computed",
        acts=Acts.STEP,
        wrong="""\
from functools import lru_cache


@lru_cache
def norm_of(layer):
    return float(model[layer].weight.detach().norm())


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.param_groups[0]["lr"] = 0.1 * norm_of(0)
    optimizer.step()
""",
        twin="""\
from functools import lru_cache


@lru_cache
def norm_of(layer):
    return float(model[layer].weight.detach().norm())


norm_of(0)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.param_groups[0]["lr"] = 0.1 * norm_of(0)
    optimizer.step()
""",
    ),
    # Settings, hooks and parts of modules.
    Kind(
        name="a number of the model that each step multiplies",
        acts=Acts.STEP,
        wrong="""\
class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.temperature = model, 1.0

    def forward(self, inputs):
        return self.layers(inputs) / self.temperature


net = Tempered()
state = elastic.State(net=net, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: mse_loss(net(batch.data[0]).squeeze(1), batch.data[1]))
    optimizer.step()
    net.temperature *= 0.9
""",
        twin="""\
class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = model
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, inputs):
        return self.layers(inputs) / self.temperature


net = Tempered()
state = elastic.State(net=net, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(lambda batch: mse_loss(net(batch.data[0]).squeeze(1), batch.data[1]))
    optimizer.step()
    net.temperature.mul_(0.9)
""",
    ),
    Kind(
        name="a dropout rate that one step sets",
        acts=Acts.EPOCH,
        wrong="""\
model.append(nn.Dropout(0.1))
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    if step.number == 7:
        model[3].p = 0.5
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
model.append(nn.Dropout(0.1))
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    model[3].p = 0.1 if step.number < 7 else 0.5
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="the mode of a network outside the State",
        acts=Acts.EPOCH,
        wrong="""\
teacher = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5)).requires_grad_(False).eval()


def distilled(batch):
    return loss_of(batch) + mse_loss(model(batch.data[0]), teacher(batch.data[0]))


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(distilled)
    optimizer.step()
    if step.number == 6:
        teacher.train()
""",
        twin="""\
teacher = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5)).requires_grad_(False).eval()


def distilled(batch):
    return loss_of(batch) + mse_loss(model(batch.data[0]), teacher(batch.data[0]))


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    teacher.train(step.number > 6)
    step.mean_loss(distilled)
    optimizer.step()
""",
    ),
    Kind(
        name="a list in an attribute of the model that grows",
        acts=Acts.STEP,
        wrong="""\
model.losses = []
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    model.losses.append(step.mean_loss(loss_of))
    optimizer.param_groups[0]["lr"] = 0.1 * sum(model.losses) / len(model.losses)
    optimizer.step()
""",
        twin="""\
class Model(nn.Sequential):
    def get_extra_state(self):
        return {"losses": self.losses}

    def set_extra_state(self, saved):
        self.losses = saved["losses"]


model = Model(*model)
model.losses = []
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    model.losses.append(step.mean_loss(loss_of))
    optimizer.param_groups[0]["lr"] = 0.1 * sum(model.losses) / len(model.losses)
    optimizer.step()
""",
    ),
    Kind(
        name="a layer that one step swaps",
        acts=Acts.EPOCH,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    if step.number == 7:
        model[1] = nn.ReLU()
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
early, late = model[1], nn.ReLU()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    model[1] = early if step.number < 7 else late
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a hook on a module that one step sets",
        acts=Acts.EPOCH,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    if step.number == 7:
        model[1].register_forward_hook(lambda module, inputs, output: 0.5 * output)
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
scale = 1.0
model[1].register_forward_hook(lambda module, inputs, output: scale * output)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    scale = 1.0 if step.number < 7 else 0.5
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    # What the loop sets in its dataset.
    Kind(
        name="labels of the dataset that an epoch's end replaces",
        acts=Acts.EPOCH,
        wrong="""\
class Labelled(Dataset):
    def __init__(self):
        self.inputs, self.labels = samples.tensors

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


dataset = Labelled()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(dataset, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        dataset.labels = model(dataset.inputs).detach().squeeze(1)
""",
        twin="""\
values = elastic.Values(labels=samples.tensors[1])


class Labelled(Dataset):
    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        return samples[index][0], values.labels[index]


state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(Labelled(), epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        values.labels = model(samples.tensors[0]).detach().squeeze(1)
""",
    ),
    Kind(
        name="weights of samples in an array that each step writes",
        acts=Acts.STEP,
        wrong="""\
class Weighted(Dataset):
    weights = torch.ones(48)

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        inputs, target = samples[index]
        return inputs, target * self.weights[index]


dataset = Weighted()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(dataset, epochs=EPOCHS), state):
    loss = step.mean_loss(loss_of)
    optimizer.step()
    dataset.weights[:] = 0.9 * dataset.weights + 0.1 * loss
""",
        twin="""\
values = elastic.Values(weights=torch.ones(48))


class Weighted(Dataset):
    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        inputs, target = samples[index]
        return inputs, target * values.weights[index]


state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(Weighted(), epochs=EPOCHS), state):
    loss = step.mean_loss(loss_of)
    optimizer.step()
    values.weights[:] = 0.9 * values.weights + 0.1 * loss
""",
    ),
    Kind(
        name="a strength of the dataset that an epoch's end raises",
        acts=Acts.EPOCH,
        wrong="""\
class Noisy(Dataset):
    strength = 0.0

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        inputs, target = samples[index]
        return inputs + self.strength * torch.randn(4), target


dataset = Noisy()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(dataset, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        dataset.strength += 0.1
""",
        twin="""\
class Noisy(Dataset):
    strength = 0.0

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        inputs, target = samples[index]
        return inputs + self.strength * torch.randn(4), target


dataset = Noisy()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(dataset, epochs=EPOCHS), state):
    dataset.strength = 0.1 * step.epoch
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a shared number of multiprocessing in the dataset",
        acts=Acts.EPOCH,
        wrong="""\
from multiprocessing import Value


class Staged(Dataset):
    def __init__(self):
        self.stage = Value("i", 0)

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        inputs, target = samples[index]
        return inputs * (1 + self.stage.value), target


dataset = Staged()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(dataset, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        dataset.stage.value += 1
""",
        twin="""\
class Staged(Dataset):
    stage = 0

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        inputs, target = samples[index]
        return inputs * (1 + self.stage), target


dataset = Staged()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(dataset, epochs=EPOCHS), state):
    dataset.stage = step.epoch
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a transform of the dataset that an epoch's end replaces",
        acts=Acts.EPOCH,
        wrong="""\
class Transformed(Dataset):
    transform = nn.Identity()

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        inputs, target = samples[index]
        return self.transform(inputs), target


dataset = Transformed()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(dataset, epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
    if step.ends_epoch:
        dataset.transform = torch.sin
""",
        twin="""\
class Transformed(Dataset):
    transform = nn.Identity()

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        inputs, target = samples[index]
        return self.transform(inputs), target


dataset, weak = Transformed(), nn.Identity()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(dataset, epochs=EPOCHS), state):
    dataset.transform = weak if step.epoch == 0 else torch.sin
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a global that only collate reads",
        acts=Acts.STEP,
        wrong="""\
from torch.utils.data import default_collate

SIGMA = 1.0


def collate(batch):
    inputs, targets = default_collate(batch)
    return inputs + SIGMA * torch.randn(inputs.shape), targets


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS, collate=collate), state):
    step.mean_loss(loss_of)
    optimizer.step()
    SIGMA *= 0.8
""",
        twin="""\
from torch.utils.data import default_collate

SIGMA = 1.0


def collate(batch):
    inputs, targets = default_collate(batch)
    return inputs + SIGMA * torch.randn(inputs.shape), targets


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS, collate=collate), state):
    SIGMA = 0.8 ** (step.number - 1)
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    # What loading keeps of the samples before.
    Kind(
        name="a generator of the dataset's own",
        acts=Acts.STEP,
        wrong="""\
import numpy as np


class Noisy(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        inputs, target = samples[index]
        return inputs + 0.1 * self.rng.normal(), target


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(Noisy(), epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
import numpy as np


class Noisy(Dataset):
    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        inputs, target = samples[index]
        return inputs + 0.1 * np.random.normal(), target


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(Noisy(), epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a count of loaded samples that lets noise fall",
        acts=Acts.STEP,
        wrong="""\
class Noisy(Dataset):
    loaded = 0

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        self.loaded += 1
        inputs, target = samples[index]
        return inputs + torch.randn(4) / self.loaded, target


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(Noisy(), epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
class Noisy(Dataset):
    loaded = 0

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        inputs, target = samples[index]
        return inputs + torch.randn(4) / (1 + self.loaded), target


dataset = Noisy()
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(dataset, epochs=EPOCHS), state):
    dataset.loaded = 8 * step.number
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a cache of augmented samples",
        acts=Acts.EPOCH,
        wrong="""\
class Cached(Dataset):
    def __init__(self):
        self.cache = {}

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        if index not in self.cache:
            inputs, target = samples[index]
            self.cache[index] = inputs + 0.1 * torch.randn(4), target
        return self.cache[index]


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(Cached(), epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
class Cached(Dataset):
    def __init__(self):
        self.cache = {}

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = samples[index]
        inputs, target = self.cache[index]
        return inputs + 0.1 * torch.randn(4), target


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(Cached(), epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="an augmentation that changes the dataset in place",
        acts=Acts.EPOCH,
        wrong="""\
class Erased(Dataset):
    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        inputs, target = samples[index]
        inputs[torch.randint(4, ())] = 0
        return inputs, target


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(Erased(), epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
class Erased(Dataset):
    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        inputs, target = samples[index]
        inputs = inputs.clone()
        inputs[torch.randint(4, ())] = 0
        return inputs, target


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(Erased(), epochs=EPOCHS), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="the greatest sample so far that collate divides by",
        acts=Acts.STEP,
        wrong="""\
from torch.utils.data import default_collate


class Normalised:
    greatest = 0.0

    def __call__(self, batch):
        inputs, targets = default_collate(batch)
        self.greatest = 0.9 * self.greatest + float(inputs.abs().max())
        return inputs / self.greatest, targets


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS, collate=Normalised()), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
from torch.utils.data import default_collate


class Normalised:
    def __call__(self, batch):
        inputs, targets = default_collate(batch)
        self.greatest = float(inputs.abs().max())
        return inputs / self.greatest, targets


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS, collate=Normalised()), state):
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="numbers that labels get when they first come",
        acts=Acts.STEP,
        wrong="""\
class Numbered(Dataset):
    def __init__(self):
        self.numbers = {}

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        label = "abcdefgh"[index % 8]
        return samples[index][0], self.numbers.setdefault(label, len(self.numbers)) / 8


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(Numbered(), epochs=EPOCHS), state):
    step.mean_loss(lambda batch: mse_loss(model(batch.data[0]).squeeze(1), batch.data[1].float()))
    optimizer.step()
""",
        twin="""\
class Numbered(Dataset):
    def __init__(self):
        self.numbers = {label: number for number, label in enumerate("abcdefgh")}

    def __len__(self):
        return len(samples)

    def __getitem__(self, index):
        label = "abcdefgh"[index % 8]
        return samples[index][0], self.numbers[label] / 8


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(Numbered(), epochs=EPOCHS), state):
    step.mean_loss(lambda batch: mse_loss(model(batch.data[0]).squeeze(1), batch.data[1].float()))
    optimizer.step()
""",
    ),
    # Files and settings of the process.
    Kind(
        name="a number in a file that each step reads and writes",
        acts=Acts.STEP,
        wrong="""\
path = run.path(f"mean{run.rank}.pt")
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    mean = torch.load(path) if path.exists() else 1.0
    loss = step.mean_loss(lambda batch: loss_of(batch) / mean)
    optimizer.step()
    torch.save(0.9 * mean + 0.1 * loss, path)
""",
        twin="""\
path = run.path(f"mean{run.rank}.pt")
values = elastic.Values(mean=1.0)
state = elastic.State(model=model, optimizer=optimizer, values=values)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    loss = step.mean_loss(lambda batch: loss_of(batch) / values.mean)
    optimizer.step()
    values.mean = 0.9 * values.mean + 0.1 * loss
    torch.save(values.mean, path)
""",
    ),
    Kind(
        name="a variable of the environment that one step sets",
        acts=Acts.EPOCH,
        wrong="""\
import os

state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    if step.number == 7:
        os.environ["PHASE"] = "late"
    optimizer.param_groups[0]["lr"] = 0.02 if os.environ.get("PHASE") == "late" else 0.1
    step.mean_loss(loss_of)
    optimizer.step()
""",
        twin="""\
import os

state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    os.environ["PHASE"] = "early" if step.number < 7 else "late"
    optimizer.param_groups[0]["lr"] = 0.02 if os.environ.get("PHASE") == "late" else 0.1
    step.mean_loss(loss_of)
    optimizer.step()
""",
    ),
    Kind(
        name="a default dtype that one step sets",
        acts=Acts.EPOCH,
        wrong="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    if step.number == 7:
        torch.set_default_dtype(torch.float64)
    noise = 0.1 * torch.randn(4)
    step.mean_loss(lambda batch: mse_loss(model((batch.data[0] + noise).float()).squeeze(1), batch.data[1]))
    optimizer.step()
""",
        twin="""\
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    torch.set_default_dtype(torch.float32 if step.number < 7 else torch.float64)
    noise = 0.1 * torch.randn(4)
    torch.set_default_dtype(torch.float32)
    step.mean_loss(lambda batch: mse_loss(model((batch.data[0] + noise).float()).squeeze(1), batch.data[1]))
    optimizer.step()
""",
    ),
    Kind(
        name="a function of a library that one step replaces",
        acts=Acts.EPOCH,
        wrong="""\
import torch.nn.functional as F


def curved(batch):
    return mse_loss(F.softplus(model(batch.data[0])).squeeze(1), batch.data[1])


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    if step.number == 7:
        F.softplus = F.relu
    step.mean_loss(curved)
    optimizer.step()
""",
        twin="""\
import torch.nn.functional as F

F.softplus = F.relu


def curved(batch):
    return mse_loss(F.softplus(model(batch.data[0])).squeeze(1), batch.data[1])


state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(samples, epochs=EPOCHS), state):
    step.mean_loss(curved)
    optimizer.step()
""",
    ),
)
