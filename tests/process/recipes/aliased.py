"""A recipe that names parts of its objects before the loop, and sets things through the names."""

import torch
from torch.utils.data import TensorDataset

import elastic


class Descent(torch.optim.Optimizer):
    """SGD with a momentum, without the methods of torch's own that import a compiler."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def add_param_group(self, param_group: dict) -> None:
        self.param_groups.append({"params": list(param_group["params"]), **self.defaults})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.sub_(group["lr"] * momentum.mul_(0.5).add_(parameter.grad))


class Slow:
    """Weights that follow the model's, and the model's own ones without a copy."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.net, self.own, self.history, self.calls = net, list(net.parameters()), [], 0
        self.average = [each.detach().clone() for each in self.own]

    def update(self) -> None:
        self.calls += 1
        self.history.append(float(self.own[0].sum()))
        for average, mine in zip(self.average, self.own, strict=True):
            average.lerp_(mine.detach(), 0.25)

    def state_dict(self) -> dict:
        return {"own": self.own, "average": self.average, "history": self.history, "calls": self.calls}

    def load_state_dict(self, state: dict) -> None:
        self.own, self.average, self.history = state["own"], state["average"], state["history"]
        self.calls = state["calls"]


run = elastic.start(seed=0, global_batch=4, shards=2)
net = torch.nn.Linear(2, 3)
optimizer, slow = Descent(list(net.parameters())), Slow(net)
data = run.data(TensorDataset(torch.arange(16.0).reshape(8, 2) / 16), epochs=4)
state = elastic.State(net=net, optimizer=optimizer, slow=slow)
(group,), momenta, history, average = optimizer.param_groups, optimizer.state, slow.history, slow.average[0]
for step in run.steps(data, state):
    # The list and the average are others in a calm run too, which begins with a load.
    assert group is optimizer.param_groups[0] and momenta is optimizer.state and slow.own[0] is net.weight
    assert history is not slow.history and average is not slow.average[0]
    group["lr"] = 0.1 / step.number
    step.mean_loss(lambda batch: net(batch.data[0]).square().mean())
    optimizer.step()
    slow.update()
    for of_one in momenta.values():
        of_one["momentum"].mul_(1.0 + len(history) / 100)
    with torch.no_grad():
        net.bias.add_(0.01 * average.sum())
