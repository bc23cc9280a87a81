"""Loops that remember something outside their State, each written as people write it."""

import sys
import textwrap
from pathlib import Path

import pytest
import torch

import elastic
from elastic.errors import UsageError
from elastic.events import UnsavedVariables
from elastic.train.body_changes import BodyChanges
from elastic.train.body_places import BodyPlaces
from elastic.train.dataset_settings import DatasetSettings
from elastic.train.given_data import GivenData
from elastic.train.left_behind import Leftovers
from elastic.train.loop_look import Look
from elastic.train.loop_memory import LoopMemory
from elastic.train.module_settings import ModuleSettings
from elastic.train.saved_leaves import SavedLeaves
from elastic.train.unsaved_sentences import sentence

# The library's own frames are no part of a recipe, and neither is this one.
STEPS = compile(
    "import sys\ndef steps_of(memory, count, Step, kept):\n    for number in range(1, count + 1):\n        memory.begin(number)\n"
    "        yield Step(number)\n        if number in kept:\n            memory.before_saving(number, sys._getframe())",
    str(Path(elastic.__file__).parent / "steps.py"),
    "exec",
)
HEADER = """
import collections, copy, functools, itertools, math, random, time
import numpy as np
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def update():
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)

"""


class Unread(BodyChanges):
    """See test_body_changes.py: here no step has moments inside."""

    def _changed(self):
        return []


class Step:
    def __init__(self, number):
        self.number = number

    def mean_loss(self, function):
        return 0.0


Step.__module__ = "elastic.train.step"


def outcome(recipe, count=9, form="module", found=None, kept=()):
    """(what was refused, names that were said to change, names read after the loop).

    found: takes the events. kept: the steps whose states are.
    """
    found = [] if found is None else found
    names: dict = {}
    exec(STEPS, names)
    space = {"__name__": "recipe", "elastic": elastic}

    def run_steps(dataset=None, collate=None, workers=0, weights=None, order=None, **objects):
        state = elastic.State(**objects)
        left_out = [found, names, space, Step]
        memory = LoopMemory(
            state=state,
            last_step=count,
            left_out=left_out,
            report=found.append,
            body=Unread(state=state, dataset=None, settings=(modules := ModuleSettings(state=state))),
            settings=DatasetSettings(dataset=dataset, collate=collate),
            modules=modules,
            places=BodyPlaces(state, Leftovers(state, lambda: False)),
            workers=workers,
            given=GivenData({"dataset": dataset, "collate": collate, "weights": weights, "order": order}),
        )
        return names["steps_of"](memory, count, Step, kept)

    space["run_steps"] = run_steps
    text = HEADER + textwrap.dedent(recipe)
    if form == "function":
        text = "def main():\n" + textwrap.indent(text, "    ") + "\nmain()\n"
    refused = ""
    try:
        exec(compile(text, "/recipes/recipe.py", "exec"), space)
    except UsageError as error:
        refused = str(error)
    changing = {name for each in found for name in each.changing}
    return refused, changing, {name for each in found for name in each.after_loop}


LOOP = "for step in run_steps(model=model, optimizer=optimizer):\n"
REFUSED = {
    "adapted.base.weight": """
        class Adapted(nn.Module):
            def __init__(self):
                super().__init__()
                self.base, self.up = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
            def state_dict(self, *given, **named):
                state = super().state_dict(*given, **named)
                return {name: value for name, value in state.items() if "base" not in name}
            def load_state_dict(self, state, strict=True):
                return super().load_state_dict(state, strict=False)
        adapted = Adapted()
        for step in run_steps(model=model, optimizer=optimizer, adapted=adapted):
            update()
            with torch.no_grad():
                adapted.base.weight += 0.1
        """,
    "teacher.0.weight": """
        teacher = copy.deepcopy(model)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            with torch.no_grad():
                for ours, its in zip(model.parameters(), teacher.parameters()):
                    its.mul_(0.9).add_(ours, alpha=0.1)
        """,
    "slow[0]": """
        slow = [p.detach().clone() for p in model.parameters()]
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number % 2 == 0:
                for kept, p in zip(slow, model.parameters()):
                    kept.add_(p.detach() - kept, alpha=0.5)
                    p.data.copy_(kept)
        """,
    "hidden[0]": """
        hidden = [p.detach().clone() for p in model.parameters()]
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number % 3 == 0:
                for kept, p in zip(hidden, model.parameters()):
                    kept.data.add_(p.data - kept.data, alpha=0.5)
                    p.data.copy_(kept)
        """,
    "viewed": """
        viewed = model[0].weight.detach().clone()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number % 3 == 0:
                viewed.numpy()[:] = 0.5 * viewed.numpy() + model[0].weight.detach().numpy()
                model[0].weight.data.copy_(viewed)
        """,
    "large": """
        large = torch.zeros(300, 1000).t()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            large.data[step.number] = 1.0
        """,
    "every.slow[0]": """
        class Every(torch.optim.SGD):
            def __init__(self, parameters, lr):
                super().__init__(parameters, lr)
                self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
                self.param_groups[0]["count"] = 0
            def step(self):
                super().step()
                self.param_groups[0]["count"] += 1
                if self.param_groups[0]["count"] % 5 == 0:
                    for slow, p in zip(self.slow, self.param_groups[0]["params"]):
                        slow.data.add_(p.data - slow.data, alpha=0.5)
                        p.data.copy_(slow.data)
        every = Every(model.parameters(), 0.1)
        for step in run_steps(model=model, optimizer=optimizer, every=every):
            update()
            every.step()
        """,
    "loss_function.center": """
        class Loss(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("center", torch.zeros(4))
            def update(self, x):
                self.center = 0.9 * self.center + 0.1 * x
        loss_function = Loss()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            loss_function.update(torch.ones(4))
        """,
    "net.usage": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)
                self.register_buffer("usage", torch.zeros(4), persistent=False)
        net = Net()
        for step in run_steps(model=model, optimizer=optimizer, net=net):
            update()
            net.usage += 1
        """,
    "scheduler.count": """
        class Warmup:
            def __init__(self, optimizer):
                self.optimizer, self.count = optimizer, 0
            def step(self):
                self.count += 1
                for group in self.optimizer.param_groups:
                    group["lr"] = 0.1 / self.count
        scheduler = Warmup(optimizer)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            scheduler.step()
        """,
    "iterator": """
        def cycle(loader):
            while True:
                for batch in loader:
                    yield batch
        other = [(torch.ones(4), number) for number in range(3)]
        iterator = cycle(torch.utils.data.DataLoader(other))
        for step in run_steps(model=model, optimizer=optimizer):
            x, _ = next(iterator)
            update()
        """,
    "batches": """
        loader = torch.utils.data.DataLoader([torch.ones(4)] * 9)
        batches = iter(loader)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            x = next(batches, None)
        """,
    "rng": """
        rng = np.random.default_rng(0)
        for step in run_steps(model=model, optimizer=optimizer):
            noise = rng.normal()
            update()
        """,
    "generator": """
        generator = torch.Generator().manual_seed(0)
        for step in run_steps(model=model, optimizer=optimizer):
            noise = torch.randn(3, generator=generator)
            update()
        """,
    "dice": """
        dice = random.Random(0)
        def roll():
            return dice.random()
        for step in run_steps(model=model, optimizer=optimizer):
            if roll() < 0.5:
                update()
        """,
    "priorities": """
        priorities = np.ones(32)
        for step in run_steps(model=model, optimizer=optimizer):
            chosen = priorities.argmax()
            priorities[chosen] = update()
        """,
    "own.momenta[0]": """
        class Own(torch.optim.Optimizer):
            def __init__(self, parameters):
                super().__init__(parameters, {"lr": 0.1})
                self.momenta = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]
            @torch.no_grad()
            def step(self):
                for momentum, p in zip(self.momenta, self.param_groups[0]["params"]):
                    momentum.mul_(0.9).add_(p.grad)
                    p.sub_(0.1 * momentum)
        own = Own(model.parameters())
        for step in run_steps(model=model, own=own):
            update()
            own.step()
        """,
    "wrapper.slow[0][0]": """
        class Lookahead(torch.optim.Optimizer):
            def __init__(self, base):
                self.optimizer, self.param_groups, self.state = base, base.param_groups, base.state
                self.count = 0
                self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]
            def step(self):
                self.optimizer.step()
                self.count += 1
                if self.count % 5 == 0:
                    for kept, group in zip(self.slow, self.param_groups):
                        for slow, p in zip(kept, group["params"]):
                            slow.add_(p.detach() - slow, alpha=0.5)
                            p.data.copy_(slow)
            def state_dict(self):
                return self.optimizer.state_dict()
            def load_state_dict(self, state):
                self.optimizer.load_state_dict(state)
        wrapper = Lookahead(optimizer)
        for step in run_steps(model=model, wrapper=wrapper):
            update()
            wrapper.step()
        """,
    "rewind": """
        rewind = torch.zeros(4, 4)
        kept = elastic.Values(weights=rewind)
        for step in run_steps(model=model, optimizer=optimizer, kept=kept):
            update()
            rewind.copy_(model[0].weight.detach())
        """,
    "average": """
        average = torch.zeros(4)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            average = 0.9 * average + 0.1 * model[0].bias.detach()
        """,
    "best": """
        best = copy.deepcopy(model.state_dict())
        lowest = math.inf
        for step in run_steps(model=model, optimizer=optimizer):
            loss = update()
            if step.number % 2:
                best = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(best)
        """,
    "queue": """
        queue = collections.deque(maxlen=50)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            queue.append(torch.ones(3))
        """,
    "self.teacher.weight": """
        class Trainer:
            def __init__(self):
                self.teacher = nn.Linear(2, 2)
            def fit(self):
                for step in run_steps(model=model, optimizer=optimizer):
                    update()
                    with torch.no_grad():
                        self.teacher.weight.mul_(0.9)
        trainer = Trainer()
        trainer.fit()
        """,
    "world.dice": """
        class World:
            def __init__(self):
                self.dice, self.place = np.random.default_rng(0), np.zeros(3)
            def move(self):
                self.place = self.place + self.dice.normal(size=3)
        world = World()
        for step in run_steps(model=model, optimizer=optimizer):
            world.move()
            update()
        """,
    "values.best": """
        values = elastic.Values(best=math.inf)
        for step in run_steps(model=model, optimizer=optimizer):
            values.best = min(values.best, update())
        """,
    "x": """
        other = torch.utils.data.DataLoader([torch.ones(4)] * 20)
        for step, x in zip(run_steps(model=model, optimizer=optimizer), other):
            update()
            print(x.mean())
        """,
}

TEACHER = """
        teacher = copy.deepcopy(model)
        {}
        def follow():
            with torch.no_grad():
                for ours, its in zip(model.parameters(), teacher.parameters()):
                    its.mul_(0.9).add_(ours, alpha=0.1)
        {}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            {}
        """
WRAPPERS = {
    "no_grad": ("@torch.no_grad()", "", "follow()"),
    "no_grad and a cache": (
        "@functools.cache\n        @torch.inference_mode(False)",
        "",
        "follow.__wrapped__()",
    ),
    "a partial": ("", "follow = functools.partial(torch.no_grad()(follow))", "follow()"),
    "a dict": ("", 'hooks = {"update": follow}', 'hooks["update"]()'),
    "a list of partials": ("", "hooks = [functools.partial(follow)]", "[each() for each in hooks]"),
    "a dict of lists": ("@torch.no_grad()", 'hooks = {"step": [follow]}', 'hooks["step"][0]()'),
    "a bound argument": ("", "hook = functools.partial(lambda each: each(), follow)", "hook()"),
    "an attribute": (
        "",
        "hooks = type('Hooks', (), {'__module__': 'a text'})()\n        hooks.update = follow",
        "hooks.update()",
    ),
    "a hook of the optimizer": ("", "optimizer.register_step_post_hook(lambda *_: follow())", ""),
    "a decorator without wraps": (
        "",
        """def twice(function):
            def call():
                function()
            return call
        follow = twice(follow)""",
        "follow()",
    ),
}
CLASSES = {
    "a static method": "@staticmethod\n            def run(): follow()",
    "a class method": "@classmethod\n            def run(cls): follow()",
    "a property": "@property\n            def run(self):\n                follow()\n                return print",
    "a decorated method": "@torch.no_grad()\n            def run(self): follow()",
    "a cached property": "@functools.cached_property\n            def run(self): return follow",
}


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("kind", [*WRAPPERS, *CLASSES])
def test_what_a_function_changes_is_refused_however_the_function_is_wrapped(kind, form):
    """By a decorator, which has code of a library, in a container, or in a class."""
    if kind in WRAPPERS:
        recipe = TEACHER.format(*WRAPPERS[kind])
    else:
        made = f"class Hooks:\n            {CLASSES[kind]}\n        hooks = Hooks()"
        recipe = TEACHER.format("", made, "hooks.run()")
    refused, _, _ = outcome(recipe, form=form)
    assert refused.startswith("teacher.0.weight"), refused


@pytest.mark.parametrize("form", ["module", "function"])
def test_a_decorated_function_that_a_factory_made_hides_nothing(form):
    """Its teacher is in its closure alone, behind the decorator's code."""
    recipe = """
        def following(model):
            teacher = copy.deepcopy(model)
            @torch.no_grad()
            def follow():
                for ours, its in zip(model.parameters(), teacher.parameters()):
                    its.mul_(0.9).add_(ours, alpha=0.1)
            return follow
        follow = following(model)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            follow()
        """
    assert outcome(recipe, form=form)[0].startswith("teacher.0.weight")


@pytest.mark.parametrize("decorator", ["", "@torch.no_grad()"])
def test_a_tensor_that_a_decorated_method_updates_is_refused_as_by_a_plain_one(decorator):
    recipe = f"""
        class Center:
            def __init__(self):
                self.c = torch.zeros(1)
            {decorator}
            def update(self, x):
                self.c = 0.9 * self.c + 0.1 * x
        center = Center()
        for step in run_steps(model=model, optimizer=optimizer):
            center.update(update())
        """
    assert outcome(recipe)[0].startswith("center.c was changed")


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("path", REFUSED)
def test_what_the_loop_keeps_outside_its_state_is_refused_by_name(path, form):
    refused, _, _ = outcome(REFUSED[path], form=form)
    assert refused.startswith(path), refused
    assert "no object of the State saves" in refused


SAID = {
    "best patience": """
        best, patience = math.inf, 0
        for step in run_steps(model=model, optimizer=optimizer):
            loss = update() * step.number
            if loss < best:
                best, patience = loss, 0
            else:
                patience += 1
        """,
    "worst losses": """
        steps = run_steps(model=model, optimizer=optimizer)
        def epoch(steps, length):
            losses = []
            for _ in range(length):
                next(steps)
                losses.append(update())
            return sum(losses)
        worst = 0
        for number in range(3):
            worst = max(worst, epoch(steps, 3))
        """,
    "history": """
        history = []
        for step in run_steps(model=model, optimizer=optimizer):
            history.append(update())
        """,
    "number": """
        for number, step in enumerate(run_steps(model=model, optimizer=optimizer)):
            update()
            if number < 3:
                optimizer.param_groups[0]["lr"] = 0.1
        """,
    "ema.steps": """
        class EMA:
            def __init__(self, model):
                self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
                self.steps = 0
            def update(self, model):
                self.steps += 1
                for name, p in model.named_parameters():
                    self.shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)
            def state_dict(self):
                return {"shadow": {name: value.clone() for name, value in self.shadow.items()}}
            def load_state_dict(self, state):
                self.shadow = state["shadow"]
        ema = EMA(model)
        for step in run_steps(model=model, optimizer=optimizer, ema=ema):
            update()
            ema.update(model)
        """,
    "slow._count": """
        class Lookahead(torch.optim.SGD):
            def __init__(self, parameters, lr):
                super().__init__(parameters, lr)
                self._count = 0
            def step(self, closure=None):
                super().step(closure)
                self._count += 1
        slow = Lookahead(model.parameters(), 0.1)
        for step in run_steps(model=model, optimizer=optimizer, slow=slow):
            update()
            slow.step()
        """,
    "schedule.at schedule.length": """
        class Cycles(torch.optim.lr_scheduler.LRScheduler):
            def __init__(self, optimizer):
                self.at, self.length = 0, 2
                super().__init__(optimizer)
            def get_lr(self):
                return [rate * (1 - self.at / self.length) for rate in self.base_lrs]
            def step(self, epoch=None):
                self.at += 1
                if self.at == self.length:
                    self.at, self.length = 0, 2 * self.length
                super().step()
            def state_dict(self):
                return {"last_epoch": self.last_epoch}
            def load_state_dict(self, state):
                self.last_epoch = state["last_epoch"]
        schedule = Cycles(optimizer)
        for step in run_steps(model=model, schedule=schedule, optimizer=optimizer):
            update()
            schedule.step()
        """,
    "count": """
        count = 0
        def train():
            global count
            count += 1
            return update()
        for step in run_steps(model=model, optimizer=optimizer):
            train()
        """,
    "weight": """
        weight = model[0].weight
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            weight.square().sum()
            if step.number == 5:
                weight = model[2].weight
        """,
    "keep": """
        keep = {"w": model[0].weight, "b": model[0].bias}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            keep["w"].square().sum()
            if step.number == 5:
                keep["w"] = model[2].weight
        """,
    "pair": """
        pair = [model[0].weight, model[2].weight]
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            pair[0].square().sum()
            if step.number == 5:
                pair[0], pair[1] = pair[1], pair[0]
        """,
    "trainer.weight": """
        class Trainer:
            pass
        trainer = Trainer()
        trainer.weight = model[0].weight
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            trainer.weight.square().sum()
            if step.number == 5:
                trainer.weight = model[2].weight
        """,
    "moment": """
        moment = None
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number == 3:
                moment = optimizer.state[model[0].weight]["momentum_buffer"]
            if moment is not None:
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + float(moment.norm()))
        """,
    "optimizer.defaults": """
        extra = nn.Parameter(torch.ones(1))
        model.register_parameter("extra", extra)
        for step in run_steps(model=model, optimizer=optimizer):
            if step.number == 8:
                optimizer.add_param_group({"params": [extra]})
            update()
            if step.number == 5:
                optimizer.defaults["lr"] = 0.5
        """,
    "meter.total meter.seen": """
        class Meter:
            total, seen = 0.0, 0
            def add(self, value):
                self.total += value
                self.seen += 1
        meter = Meter()
        for step in run_steps(model=model, optimizer=optimizer):
            meter.add(update())
        """,
}


@pytest.mark.parametrize("names", SAID)
def test_numbers_that_the_loop_keeps_are_named_once(names):
    refused, changing, _ = outcome(SAID[names])
    assert (refused, changing) == ("", set(names.split()))


HARMLESS = {
    "a wrapper that has the state and the groups of an optimizer of the State": """
        class Wrap(torch.optim.Optimizer):
            def __init__(self, base):
                self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, {}
                self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
            def step(self, closure=None):
                self.base.step()
        wrap = Wrap(optimizer)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            wrap.step()
            wrap.param_groups[0]["lr"] *= 0.9
        """,
    "names for parameters, each pass anew or as they were": """
        class Trainer:
            def __init__(self):
                self.weights = list(model.parameters())
            def first(self):
                if not hasattr(self, "head"):
                    self.head = model[2].weight
        trainer, data, group = Trainer(), model[0].weight.data, optimizer.param_groups[0]["params"]
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            trainer.first()
            data = model[0].weight.data
            for parameter in group:
                parameter.square().sum()
            weight = trainer.weights[step.number % 2]
            weight.square().sum()
        """,
    "averages that an object of the State makes anew in each step": """
        class Average:
            def __init__(self, module):
                self.shadow = {name: each.detach().clone() for name, each in module.named_parameters()}
            def update(self, module):
                for name, each in module.named_parameters():
                    self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * each.detach()
            def state_dict(self):
                return dict(self.shadow)
            def load_state_dict(self, saved):
                self.shadow = dict(saved)
        average = Average(model)
        for step in run_steps(model=model, optimizer=optimizer, average=average):
            update()
            average.update(model)
        """,
    "an array that shares the memory of a tensor of the state": """
        values = elastic.Values(scale=torch.ones(3))
        whole = values.scale.numpy()
        last = whole[1:]
        for step in run_steps(model=model, optimizer=optimizer, values=values):
            update()
            whole *= 0.9
            last += 1
        """,
    "a state_dict without what is frozen": """
        class Adapted(nn.Module):
            def __init__(self):
                super().__init__()
                self.base, self.up = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
            def state_dict(self, *given, **named):
                state = super().state_dict(*given, **named)
                return {name: value for name, value in state.items() if "base" not in name}
            def load_state_dict(self, state, strict=True):
                return super().load_state_dict(state, strict=False)
        adapted = Adapted()
        for step in run_steps(model=model, optimizer=optimizer, adapted=adapted):
            update()
            with torch.no_grad():
                adapted.up.weight += 0.1
        """,
    "a state_dict that gives copies by other names": """
        class Net(nn.Linear):
            def state_dict(self, *given, **named):
                return {f"net.{name}": value.clone() for name, value in super().state_dict().items()}
        net = Net(4, 4)
        for step in run_steps(model=model, optimizer=optimizer, net=net):
            update()
            with torch.no_grad():
                net.weight += 0.1
        """,
    "a schedule of the recipe's own that saves what it has": """
        class Cycles(torch.optim.lr_scheduler.LRScheduler):
            def __init__(self, optimizer):
                self.at = 0
                super().__init__(optimizer)
            def get_lr(self):
                return [rate / (1 + self.at % 4) for rate in self.base_lrs]
            def step(self, epoch=None):
                self.at += 1
                super().step()
            def state_dict(self):
                return {"at": self.at, "last_epoch": self.last_epoch}
        schedule = Cycles(optimizer)
        for step in run_steps(model=model, schedule=schedule, optimizer=optimizer):
            update()
            schedule.step()
        """,
    "notes of torch's optimizers and schedules for themselves": """
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for step in run_steps(model=model, optimizer=optimizer, lbfgs=lbfgs, schedule=schedule):
            update()
            schedule.step()
            lbfgs.step(lambda: model(torch.ones(8, 4)).square().mean())
        """,
    "temporaries": """
        for step in run_steps(model=model, optimizer=optimizer):
            total = 0.0
            for x in range(3):
                total += x
            loss = update()
            noise = torch.randn(3)
            rng = np.random.default_rng(step.number)
            print(total, loss, noise.sum(), rng.normal())
        """,
    "set each step before it is used": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)
            def forward(self, x):
                self.last_attention = x.detach() * 2
                return self.layer(x)
        model = Net()
        weight = 0.0
        def loss_of(x):
            return weight * x
        for step in run_steps(model=model):
            weight = 1 / step.number
            rates = [1.0 / step.number]
            loss_of(3)
            model(torch.randn(2, 4))
        """,
    "a scratch variable that a function writes before it reads it": """
        scratch = torch.zeros(4)
        def centred(x):
            global scratch
            scratch = x.mean(0)
            return x - scratch
        for step in run_steps(model=model, optimizer=optimizer):
            model(centred(torch.randn(8, 4)))
        """,
    "features of hooks by name": """
        features = {}
        def keep(name, module, inputs, output):
            features[name] = output.detach()
        for name, module in model.named_modules():
            module.register_forward_hook(functools.partial(keep, name))
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            print(len(features))
        """,
    "a data set that is evaluated in a drawn order": """
        held_out = torch.utils.data.DataLoader([torch.ones(4)] * 8, batch_size=2, shuffle=True)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            print(sum(float(model(x).sum().detach()) for x in held_out))
        """,
    "a trainer in the state, which saves copies": """
        class Trainer:
            def __init__(self):
                self.net, self.optimizer, self.count = model, optimizer, 0
            def state_dict(self):
                net = {name: value.clone() for name, value in self.net.state_dict().items()}
                return {"net": net, "optimizer": self.optimizer.state_dict(), "count": self.count}
            def load_state_dict(self, state):
                raise NotImplementedError
        trainer = Trainer()
        for step in run_steps(trainer=trainer):
            update()
            trainer.count += 1
        """,
    "features of hooks": """
        features = {}
        def keep(module, inputs, output):
            features["first"] = output.detach()
        model[0].register_forward_hook(keep)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            print(features["first"].mean())
        """,
    "a cache that is made when it is first needed": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.mask = nn.Linear(4, 4), None
            def forward(self, x):
                if self.mask is None:
                    self.mask = torch.ones(4)
                return self.layer(x) * self.mask
        model = Net()
        for step in run_steps(model=model):
            model(torch.randn(2, 4))
        """,
    "a list, an array and a dict in Values, under names of their own": """
        values = elastic.Values(hist=[], table=np.zeros(4), by={"a": [1]})
        hist, table, by = values.hist, values.table, values.by["a"]
        for step in run_steps(model=model, optimizer=optimizer, values=values):
            hist.append(update())
            table[step.number % 4] += 1
            by.append(2)
        """,
    "averages that are saved in other forms": """
        class Averages:
            def __init__(self):
                self.a, self.b, self.c = torch.zeros(3), torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)
            def update(self):
                for each in (self.a, self.b, self.c):
                    each.mul_(0.5).add_(torch.randn(each.shape))
            def state_dict(self):
                return {"flat": torch.cat([self.a, self.b]), "numbers": self.c.tolist()}
            def load_state_dict(self, state):
                raise NotImplementedError
        averages = Averages()
        for step in run_steps(model=model, optimizer=optimizer, averages=averages):
            update()
            averages.update()
        """,
    "an EMA that saves copies": """
        class EMA:
            def __init__(self, model):
                self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
                self.steps = 0
                self.recent = collections.deque(maxlen=4)
            def update(self, model):
                self.steps += 1
                self.recent.append(torch.ones(2) * self.steps)
                for name, p in model.named_parameters():
                    self.shadow[name] = self.shadow[name] * 0.9 + p.detach() * 0.1
            def state_dict(self):
                return {"average": {k: v.clone() for k, v in self.shadow.items()}, "steps": self.steps, "recent": torch.stack(list(self.recent)) if self.recent else None}
            def load_state_dict(self, state):
                raise NotImplementedError
        ema = EMA(model)
        for step in run_steps(model=model, optimizer=optimizer, ema=ema):
            update()
            ema.update(model)
        """,
    "a generator of the recipe's own around the steps": """
        def shown(steps):
            for step in steps:
                yield step
        held = shown(run_steps(model=model, optimizer=optimizer))
        for step in held:
            update()
        """,
    "what is made under no_grad": """
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            with torch.no_grad(), torch.autograd.profiler.record_function("x"):
                td = model(torch.randn(2, 4))
                number = float(td.sum())
            print(td.sum(), number)
        """,
    "a closure over a variable of the loop": """
        def run_it():
            scale = 0.0
            def loss_of(x):
                return scale * x
            for step in run_steps(model=model, optimizer=optimizer):
                scale = 1 / step.number
                update()
                loss_of(torch.ones(3))
        run_it()
        """,
    "a schedule, an average and a scaler in the state": """
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        average = torch.optim.swa_utils.AveragedModel(model)
        values = elastic.Values(best=math.inf)
        for step in run_steps(model=model, optimizer=optimizer, schedule=schedule, average=average, values=values):
            values.best = min(values.best, update())
            schedule.step()
            average.update_parameters(model)
        """,
    "a state_dict that gives copies of arrays and dicts by other names": """
        class History:
            def __init__(self):
                self._losses, self.box, self.last = np.zeros((2, 3)), {"n": 0, "best": {"loss": 9.0}}, [0, 0.0]
            def update(self):
                self._losses[0, 1] += update()
                self.box["n"] += 1
                self.box["best"]["loss"] -= 0.5
                self.last[:] = self.last[0] + 1, self.last[1] + 0.5
            def state_dict(self):
                given = {"h": torch.from_numpy(self._losses.copy()), "end": tuple(self.last)}
                return {**given, "all": {**self.box, "best": dict(self.box["best"])}}
            def load_state_dict(self, state):
                self._losses[:] = state["h"].numpy()
                self.box = state["all"]
                self.last = list(state["end"])
        history = History()
        for step in run_steps(model=model, optimizer=optimizer, history=history):
            history.update()
        """,
    "a state_dict that is an attribute itself": """
        class Box:
            def __init__(self):
                self.d = {"n": 0, "inner": {"a": 1}}
            def state_dict(self):
                return self.d
            def load_state_dict(self, state):
                self.d = state
        box = Box()
        for step in run_steps(model=model, optimizer=optimizer, box=box):
            update()
            box.d["n"] += 1
        """,
}


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("habit", HARMLESS)
def test_what_each_pass_makes_or_the_state_saves_is_left_alone(habit, form):
    assert outcome(HARMLESS[habit], form=form) == ("", set(), set())


def test_an_array_that_a_state_dict_leaves_out_is_named_beside_one_that_it_gives():
    """Both have the same shape, and change in each pass."""
    recipe = """
    class History:
        def __init__(self):
            self._losses, self._counts = np.zeros(3), np.zeros(3)
        def state_dict(self):
            return {"h": torch.from_numpy(self._losses.copy())}
        def load_state_dict(self, state):
            self._losses[:] = state["h"].numpy()
    history = History()
    for step in run_steps(model=model, optimizer=optimizer, history=history):
        history._losses[0] += update()
        history._counts += 1
    """
    assert outcome(recipe) == ("", {"history._counts"}, set())


LOCALS = """
def main(lr=0.1):
    {}
    for step in run_steps(model=model, optimizer=optimizer):
        update()
        assert {}["lr"] == 0.1
main()
"""


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="there each locals() is a dict of its own")
def test_the_dict_of_locals_that_a_variable_holds_is_refused_and_not_emptied():
    """Before Python 3.13 it is the dict that a look at the frame's variables fills and empties."""
    refused, _, _ = outcome(LOCALS.format("config = locals()", "config"))
    assert refused.startswith("config is the dict that locals() gave")
    assert refused.endswith("write config = dict(locals())")


@pytest.mark.parametrize("keep", ["kept = dict(locals())", "kept = {**locals()}", "kept[:] = [locals()]"])
def test_what_a_recipe_keeps_of_locals_keeps_its_contents(keep):
    of_kept = "kept[0]" if "[:]" in keep else "kept"
    header = "kept = []\n" if "[:]" in keep else ""
    found, _, _ = outcome(header + LOCALS.format(keep, of_kept))
    assert not found.startswith("config")


def test_the_advice_names_what_can_be_done():
    refused, _, _ = outcome(REFUSED["wrapper.slow[0][0]"])
    assert refused.endswith("let the state_dict of wrapper give it, and its load_state_dict put it back")
    assert "(Values holds a copy: change values.name)" in outcome(REFUSED["rewind"])[0]


def test_all_that_one_look_finds_is_refused_in_one_sentence_with_the_advice_of_each():
    """A queue, an array and two tensors of a teacher, all of which the first pass changes."""
    recipe = """
        queue, bank, teacher = torch.zeros(4), np.zeros(3), nn.Linear(2, 2)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            queue += 1
            bank += 1
            with torch.no_grad():
                teacher.weight.mul_(0.9)
                teacher.bias.mul_(0.9)
        """
    refused, _, _ = outcome(recipe)
    found, _, advice = refused.partition(" were changed between step 1 and step 2, and ")
    assert sorted(found.replace(" and teacher", ", teacher").split(", ")) == [
        "bank",
        "queue",
        "teacher.weight (and .bias)",
    ]
    assert "bank: keep it in elastic.Values" in advice
    assert "queue: give it to the State in elastic.Values" in advice
    assert "teacher.weight (and .bias): give teacher to the State as well" in advice


def test_a_note_names_few_objects_and_what_hangs_on_them_with_each():
    """As progress bars, meters and loggers do."""
    names = ["meter.val", "best", "meter.avg", "meter.sum", "meter.count", "i", "bar.n", "a", "b", "c"]
    said = sentence(UnsavedVariables(step=4, changing=names, after_loop=[]))
    assert said.startswith(
        "note: no object of the State saves meter.val (and .avg, .sum and .count), best, i, bar.n and 3 more, which"
    )
    said = sentence(UnsavedVariables(step=4, changing=[*names, "meter.name"], after_loop=["c"]))
    assert "meter.val (and .avg, .sum and 2 more), best" in said
    assert "the script reads c after the loop" in said


def test_a_note_names_the_variables_of_a_generator():
    said = sentence(UnsavedVariables(step=4, changing=["pid (its total)", "pid (its out)"], after_loop=[]))
    assert "saves pid (its total) (and its out), which" in said


def test_a_note_begins_with_what_functions_read_and_ends_with_what_grows():
    """The history and the texts come first in the alphabet, and each record is a dict of lists."""
    found: list = []
    recipe = """
        a_history, best, a_title, a_records, z_scale = [], 9.0, "", [], 1.0
        def loss_of(x):
            return z_scale * x
        for step in run_steps(model=model, optimizer=optimizer):
            loss = update() + loss_of(step.number)
            a_history.append(loss)
            a_title += "."
            a_records.append({"loss": [loss]})
            best = min(best, loss - step.number)
            z_scale *= 0.9
        """
    refused, changing, _ = outcome(recipe, found=found)
    assert (refused, changing) == ("", {"z_scale", "best", "a_history", "a_title", "a_records"})
    (said,) = found
    assert said.changing[:2] == ["z_scale", "best"]
    assert sentence(said).endswith("what is only shown may stay")


def test_a_note_that_leaves_names_out_says_where_all_are():
    said = UnsavedVariables(step=4, changing=list("abcdefg"), after_loop=[])
    assert "a, b, c, d and 3 more" in sentence(said)
    assert sentence(said).endswith("; elastic-train report lists all of them")


READER = """
class Kept:
    def __bool__(self):
        return agent.eps > 0
kept = Kept()
"""
AGENT = """
class Agent:
    def __init__(self):
        self.eps = 1.0
    def decay(self):
        self.eps *= 0.99
    def act(self):
        return torch.rand(()) < self.eps
agent, values, low = Agent(), elastic.Values(eps=1.0), 0.05
def read(): return agent.eps
{before}
for step in {steps}run_steps(model=model, optimizer=optimizer, values=values){end}:
    {first}
    agent.act()
    update()
    values.eps *= 0.9
    {late}
{after}
"""


def named_of_agent(form, **parts):
    usual = {"late": "pass", "after": "", "before": "", "steps": "", "end": ""}
    refused, changing, _ = outcome(AGENT.format(**usual | parts), form=form, kept=(5,))
    assert not refused
    return changing


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize(
    "first",
    [
        "agent.eps = float(values.eps)",
        "agent.eps = max(low, 1 - step.number / 100)",
        "agent.eps = 0.5 * (1 + math.cos(math.pi * step.number / 9))",
        "rest = 9 - step.number; agent.eps = min(1.0, 1 / (1 + rest))",
    ],
)
def test_a_number_that_each_pass_sets_before_all_else_is_not_named(first, form):
    """It is a function of the step and of what the State saves, whatever it was before."""
    assert named_of_agent(form, first=first) <= {"rest"}
    assert "agent.eps" in named_of_agent(form, first="pass", late=first)


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize(
    "parts",
    [
        {"first": "agent.eps *= 0.99"},
        {"first": "agent.decay()"},
        {"first": "agent.eps = 1 / (step.number + agent.eps)"},
        {"first": "agent.act(); agent.eps = 1 / step.number"},
        {"first": "bool(read()); agent.eps = 1 / step.number"},
        {"first": "bool(kept); agent.eps = 1 / step.number", "before": READER},
        {"first": "if step.number % 3 == 0: agent.eps = 1 / step.number"},
        {"first": "agent.eps = 1 / step.number", "after": "print(agent.eps)"},
        {"first": "agent.eps = 1 / step.number", "after": "agent.act()"},
        {"first": "agent.eps = 1 / step.number", "after": "read()"},
        {"first": "agent.eps = 1 / step.number", "steps": "map(lambda each: read() and each, ", "end": ")"},
        {"first": "agent.eps = max(1 / step.number, 0)", "before": "def max(*_): return agent.eps * 0.9"},
    ],
    ids=lambda parts: " ".join(parts.values())[:60],
)
def test_a_number_that_something_reads_before_it_is_set_or_after_the_loop_is_named(parts, form):
    assert "agent.eps" in named_of_agent(form, **parts)


def test_what_each_pass_sets_anew_is_not_named_for_the_code_after_the_loop():
    """But what had a value before the loop: with no step left, a process would go on with that."""
    recipe = LOOP + "    loss = update()\n    other = 1\nprint(loss, step.number)"
    assert outcome(recipe) == ("", set(), set())
    assert outcome("loss = None\n" + recipe) == ("", set(), {"loss"})


def test_nothing_is_called_and_nothing_kept_alive():
    """Objects that fail where they are compared, read or asked for an attribute."""
    recipe = """
        class Bomb:
            def __getattr__(self, name):
                raise RuntimeError(name)
            def __eq__(self, other):
                raise RuntimeError("compared")
            __hash__ = None
            def __repr__(self):
                raise RuntimeError("shown")
            def __len__(self):
                raise RuntimeError("counted")
            @property
            def content(self):
                raise RuntimeError("read")
        bomb, held = Bomb(), {}
        bomb.__dict__["inner"] = [bomb]
        for step in run_steps(model=model, optimizer=optimizer):
            held["bomb"] = bomb
            x = torch.ones(1000)
            update()
        """
    assert outcome(recipe)[0] == ""


LATE = """
        bank, scores, best, history = torch.zeros(4), np.zeros(3), 9.0, [0.0]
        for step in run_steps(model=model, optimizer=optimizer):
            print(bank.sum(), scores.sum(), best, history)
            update()
            if step.number == 21:
                {}
        """


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("change", ["bank += 1", "bank = torch.ones(4)", "bank.data += 1", "scores += 1"])
@pytest.mark.parametrize(("kept", "since"), [(range(1, 40), "step 21"), ([7, 14, 21, 28], "step 16")])
def test_what_a_loop_changes_late_and_once_is_refused_before_a_state_is_kept(form, change, kept, since):
    """Between two rare looks, where the process that saw it may be gone before the next one."""
    refused, _, _ = outcome(LATE.format(change), count=40, form=form, kept=kept)
    name = change.split()[0].partition(".")[0]
    assert refused.startswith(f"{name} was changed between {since} and step 22, and no object")


@pytest.mark.parametrize("change", ["best = 0.5", "history.append(1.0)"])
def test_a_number_that_is_set_late_and_once_is_named_before_a_state_is_kept(change):
    name = change.split()[0].partition(".")[0]
    assert outcome(LATE.format(change), count=21, kept=[21]) == ("", {name}, set())


@pytest.mark.parametrize("form", ["module", "function"])
def test_a_function_that_the_loop_takes_up_late_hides_nothing(form):
    """Which variables it reads was not asked where the looks before analysed the loop."""
    recipe = """
        bank, hooks = torch.zeros(4), []
        def follow():
            bank.add_(1)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            for hook in hooks:
                hook()
            if step.number == 21:
                hooks.append(follow)
        """
    refused, _, _ = outcome(recipe, count=30, form=form, kept=range(1, 30))
    assert refused.startswith("bank was changed between step 22 and step 23")


MADE_LATE = {
    "fisher['0.weight']": """
        fisher = None
        for step in run_steps(model=model, optimizer=optimizer):
            loss = update() + (0 if fisher is None else float(fisher["0.weight"].sum()))
            if step.number == 20:
                fisher = {name: p.detach() ** 2 for name, p in model.named_parameters()}
        """,
    "grid.cells": """
        class Grid:
            def __init__(self):
                self.cells = torch.zeros(8)
        grid = None
        for step in run_steps(model=model, optimizer=optimizer):
            loss = update() + (0 if grid is None else float(grid.cells.sum()))
            if step.number == 20:
                grid = Grid()
        """,
    "criterion.weight": """
        criterion = nn.CrossEntropyLoss()
        for step in run_steps(model=model, optimizer=optimizer):
            criterion(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
            update()
            if step.number == 20:
                criterion.weight = torch.ones(2)
        """,
    "total": """
        total = 0.0
        for step in run_steps(model=model, optimizer=optimizer):
            print(total)
            update()
            if step.number == 20:
                total = total + torch.ones(1)
        """,
}


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("path", MADE_LATE)
def test_a_tensor_that_is_made_late_and_read_by_later_steps_is_refused(path, form):
    """A process that begins behind the step that made it has none, and would train without it."""
    refused, _, _ = outcome(MADE_LATE[path], count=30, form=form, kept=[20])
    assert refused.startswith(path)
    assert "between step 16 and step 21, and no object of the State saves" in refused


NEEDED_LATE = {
    "masks, by their size": """
        masks = {}
        def mask_of(size):
            if size not in masks:
                masks[size] = torch.ones(size)
            return masks[size]
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            mask_of(step.number // 10)
        """,
    "what the first step of each process makes": """
        target = None
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if target is None:
                target = torch.ones(2)
        """,
    "what each step sets before it is read": """
        weight = None
        for step in run_steps(model=model, optimizer=optimizer):
            weight = torch.ones(2) if step.number > 20 else None
            print(weight)
            update()
        """,
}


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("habit", NEEDED_LATE)
def test_what_is_made_when_it_is_first_needed_is_not_refused(habit, form):
    assert outcome(NEEDED_LATE[habit], count=30, form=form, kept=range(1, 31))[0] == ""


def test_the_end_of_the_last_step_has_a_name():
    refused, _, _ = outcome(LATE.format("bank += 1"), count=21, kept=[20, 21])
    assert refused.startswith("bank was changed between step 21 and the end of step 21")


@pytest.mark.parametrize("habit", HARMLESS)
def test_a_look_at_the_end_of_each_step_finds_no_more_than_one_at_its_beginning(habit):
    assert outcome(HARMLESS[habit], count=20, kept=range(1, 21)) == ("", set(), set())


@pytest.mark.parametrize(
    ("first", "kept", "looks"),
    [
        (1, [], [0, 1, 2, 3, 6, 7, 12, 15, 23]),
        (6, [], [5, 12, 18, 20, 23]),
        (1, [5, 12, 24], [0, 1, 2, 3, 5, 6, 7, 12, 15, 23, 24]),
    ],
)
def test_a_process_looks_where_it_begins_and_where_a_state_is_kept(first, kept, looks):
    """By the number of steps that are done. A process that goes on with a run takes one look in its
    first steps, for which a recovery waits; epochs of six steps begin in steps 7, 13 and 19.
    """
    found = []

    class Counted(LoopMemory):
        def look(self, passed, frame, *, is_kept=False):
            self._looks += 1
            nothing = {"marks": {}, "saved": {}, "leaves": SavedLeaves({}), "process": {}, "read": set()}
            self._before = Look(passed=passed, **nothing, after_loop=[])
            found.append(passed)

    state = elastic.State(model=torch.nn.Linear(1, 1))
    modules = ModuleSettings(state=state)
    body = Unread(state=state, dataset=None, settings=modules)
    parts = {"body": body, "settings": DatasetSettings(dataset=None), "modules": modules}
    parts["places"] = BodyPlaces(state, Leftovers(state, lambda: False))
    memory = Counted(state=state, last_step=24, left_out=[], report=found.append, **parts)
    for step in range(first, 25):
        memory.begin(step, begins_epoch=step % 6 == 1)
        if step in kept:
            memory.before_saving(step, None)
    assert found == looks


class Counting(torch.utils.data.Dataset):
    count, epoch, size = 0, 0, None

    def __getitem__(self, index):
        self.count, self.size = self.count + 1, 4
        self.epoch += index == 0
        return torch.zeros(4)


def test_what_loading_counts_is_named_and_said_to_be_of_each_process():
    """Each sample changes one number, sample 0 another, and the first sample sets a constant."""
    dataset, found = Counting(), []
    state = elastic.State(model=torch.nn.Linear(1, 1))
    modules = ModuleSettings(state=state)
    parts = {"settings": DatasetSettings(dataset=dataset), "modules": modules}
    body = BodyChanges(state=state, dataset=dataset, settings=modules)
    parts["places"] = BodyPlaces(state, Leftovers(state, lambda: False))
    memory = LoopMemory(state=state, last_step=9, left_out=[dataset], report=found.append, body=body, **parts)
    for step in range(1, 10):
        memory.begin(step)
        memory.before_loading(step)
        dataset[step % 2]
        memory.after_gradients()
    said, *others = found  # which name variables of this test, the recipe
    assert said.by_loading == ["dataset.count", "dataset.epoch"]
    assert not any(each.by_loading for each in others)
    assert (
        "loading samples changes dataset.count (and .epoch), in each process by the samples that it loads itself"
        in sentence(said)
    )


@pytest.mark.parametrize("has_tensor", [False, True])
def test_a_look_asks_for_the_state_only_where_it_meets_a_tensor(has_tensor, monkeypatch):
    """A state_dict of many modules takes longer than all else in a look. A buffer that is no part
    of the state must be compared with what the state has.
    """
    of_torch, taken = torch.nn.Module.state_dict, []

    def counting(*given, **named):
        taken.append(1)
        return of_torch(*given, **named)

    monkeypatch.setattr(torch.nn.Module, "state_dict", counting)
    model = torch.nn.Linear(1, 1)
    if has_tensor:
        model.register_buffer("mask", torch.ones(1), persistent=False)
    state = elastic.State(model=model)
    modules = ModuleSettings(state=state)
    parts = {"settings": DatasetSettings(dataset=None), "modules": modules}
    body = Unread(state=state, dataset=None, settings=modules)
    parts["places"] = BodyPlaces(state, Leftovers(state, lambda: False))
    memory = LoopMemory(state=state, last_step=9, left_out=[], report=print, body=body, **parts)
    for step in (0, 1, 2):
        memory.look(step, None)
    assert len(taken) == 3 * has_tensor


def test_what_an_optimizer_of_the_state_holds_is_saved_also_where_another_one_holds_it():
    """As sharpness-aware optimizers do, whichever of the two the State names first."""
    recipe = """
        class Sharp(torch.optim.Optimizer):
            def __init__(self, params, kind, **settings):
                super().__init__(params, settings)
                self.base = kind(self.param_groups, **settings)
                self.param_groups = self.base.param_groups
            def step(self):
                self.base.step()
        optimizer = Sharp(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        for step in run_steps(model=model, OBJECTS):
            update()
        """
    both = "optimizer=optimizer, base=optimizer.base", "base=optimizer.base, optimizer=optimizer"
    found = [outcome(recipe.replace("OBJECTS", objects)) for objects in (*both, "optimizer=optimizer")]
    assert found[:2] == [("", set(), set())] * 2
    assert found[2] != found[0]
