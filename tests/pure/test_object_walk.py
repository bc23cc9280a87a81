"""Places without a variable of the loop's own: classes, imported files, tuples, defaults, caches.

Each recipe changes such a place in its loop, as people write it.
"""

import sys
import textwrap

import pytest

from tests.pure import test_loop_memory as loops

UTIL = """
    import torch
    decay, count, shadow = 0.9, 0, {}
    class CFG:
        mix = 1.0
    def update(model):
        global count
        count += 1
        for name, p in model.named_parameters():
            if name not in shadow:
                shadow[name] = p.detach().clone()
            shadow[name].mul_(decay).add_(p.detach(), alpha=1 - decay)
    """


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """A file beside the recipe, which its text imports as `ema_util`."""
    (tmp_path / "ema_util.py").write_text(textwrap.dedent(UTIL))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("ema_util", None)


REFUSED = {
    "Ema.shadow['0.weight']": """
        class Ema:
            shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
            @classmethod
            def update(cls, model):
                for name, p in model.named_parameters():
                    cls.shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            Ema.update(model)
        """,
    "Ema.average['0.weight']": """
        class Ema:
            average = {name: p.detach().clone() for name, p in model.named_parameters()}
            @staticmethod
            def update(model):
                for name, p in model.named_parameters():
                    Ema.average[name] = 0.9 * Ema.average[name] + 0.1 * p.detach()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            Ema.update(model)
        """,
    "model.0.weight.slow": """
        for p in model.parameters():
            p.slow = p.detach().clone()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            with torch.no_grad():
                for p in model.parameters():
                    p.slow.lerp_(p, 0.1)
        """,
    "model.0.weight.momentum": """
        for p in model.parameters():
            p.momentum = torch.zeros_like(p)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            for p in model.parameters():
                p.momentum = 0.9 * p.momentum + p.grad
        """,
    "prior.loc": """
        prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            prior.log_prob(torch.zeros(2))
            if step.number % 2 == 0:
                h = model(torch.ones(4, 4)).detach()
                prior = torch.distributions.Normal(h.mean(0), torch.ones(2))
        """,
    "draw": """
        draw = random.Random(0).random
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            optimizer.param_groups[0]["lr"] = 0.1 * draw()
        """,
    "CFG.bank": """
        class CFG:
            bank = torch.zeros(4)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            CFG.bank = 0.9 * CFG.bank + 0.1
        """,
    "CFG.queue": """
        class CFG:
            queue = torch.zeros(4)
        def enqueue(x):
            CFG.queue[0] = x
        for step in run_steps(model=model, optimizer=optimizer):
            enqueue(update())
        """,
    "Base.center": """
        class Base:
            center = torch.zeros(4)
        class Loss(Base):
            def update(self, x):
                type(self).center.mul_(0.9).add_(x)
        loss = Loss()
        for step in run_steps(model=model, optimizer=optimizer):
            loss.update(update())
        """,
    "Net.usage": """
        class Net(nn.Module):
            usage = torch.zeros(4)
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)
        net = Net()
        for step in run_steps(model=model, optimizer=optimizer, net=net):
            update()
            Net.usage += 1
        """,
    "ema_util.shadow['0.weight']": """
        import ema_util
        ema_util.update(model)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            ema_util.update(model)
        """,
    "stats[0]": """
        stats = (torch.zeros(1), torch.ones(1))
        for step in run_steps(model=model, optimizer=optimizer):
            mean, var = stats
            stats = (0.9 * mean + update(), var)
        """,
    "seen": """
        seen = bytearray(8)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            seen[step.number % 8] += 1
        """,
    "table": """
        import array
        table = array.array("d", [0.0] * 4)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            table[step.number % 4] += 1
        """,
    "smooth(state)['mean']": """
        def smooth(x, state={"mean": torch.zeros(1)}):
            state["mean"].mul_(0.9).add_(x)
            return state["mean"]
        for step in run_steps(model=model, optimizer=optimizer):
            smooth(update())
        """,
    "Meter.add(bank)": """
        class Meter:
            @staticmethod
            def add(x, *, bank=np.zeros(4)):
                bank[0] += x
        for step in run_steps(model=model, optimizer=optimizer):
            Meter.add(update())
        """,
    "box.average": """
        import types
        box = types.SimpleNamespace(average=torch.zeros(1))
        for step in run_steps(model=model, optimizer=optimizer):
            box.average.mul_(0.9).add_(update())
        """,
    "local.average": """
        import threading
        local = threading.local()
        local.average = torch.zeros(1)
        for step in run_steps(model=model, optimizer=optimizer):
            local.average.mul_(0.9).add_(update())
        """,
    "average.get()": """
        import contextvars
        average = contextvars.ContextVar("average")
        average.set(torch.zeros(1))
        for step in run_steps(model=model, optimizer=optimizer):
            average.get().mul_(0.9).add_(update())
        """,
    "averages[Linear]": """
        import weakref
        averages = weakref.WeakKeyDictionary({model[0]: torch.zeros(1)})
        for step in run_steps(model=model, optimizer=optimizer):
            averages[model[0]].mul_(0.9).add_(update())
        """,
    "pairs": """
        pairs = itertools.product([1, 2, 3, 4], [0.1, 0.2, 0.3])
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            pair = next(pairs)
        """,
    "falling": """
        falling = itertools.accumulate(itertools.count(1), lambda total, _: total * 0.9)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            optimizer.param_groups[0]["lr"] = next(falling)
        """,
}
SAID = {
    "CFG.mix": """
        class CFG:
            mix = 1.0
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            CFG.mix *= 0.97
        """,
    "Opt.lr": """
        class CFG:
            class Opt:
                lr = 0.1
        def train():
            CFG.Opt.lr = update()
        for step in run_steps(model=model, optimizer=optimizer):
            train()
        """,
    "Noise.count": """
        class Noise:
            count = 0
            def draw(self):
                type(self).count += 1
        noise = Noise()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            noise.draw()
        """,
    "CFG.phase": """
        class CFG:
            pass
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number == 5:
                CFG.phase = 2
        """,
    "ema_util.count": """
        import ema_util
        ema_util.update(model)
        ema_util.shadow.clear()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            ema_util.update(nn.Module())
        """,
    "ema_util.decay": """
        import ema_util
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            ema_util.decay = 0.9 * ema_util.decay
        """,
    "CFG.mix from a file": """
        from ema_util import CFG
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            CFG.mix *= 0.97
        """,
    "stats": """
        stats = (0.0, 1.0)
        for step in run_steps(model=model, optimizer=optimizer):
            stats = (0.9 * stats[0] + update(), stats[1])
        """,
    "meter": """
        Meter = collections.namedtuple("Meter", "total seen")
        meter = Meter(0.0, 0)
        for step in run_steps(model=model, optimizer=optimizer):
            meter = meter._replace(total=meter.total + update(), seen=meter.seen + 1)
        """,
    "settings.mix": """
        import dataclasses
        @dataclasses.dataclass(frozen=True)
        class Settings:
            mix: float
        settings = Settings(1.0)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            settings = dataclasses.replace(settings, mix=settings.mix * 0.97)
        """,
    "remember(seen)": """
        def remember(x, seen=[0.0]):
            seen.append(x)
            return min(seen)
        for step in run_steps(model=model, optimizer=optimizer):
            remember(update())
        """,
    "weight.cache_info()": """
        @functools.lru_cache(maxsize=4)
        def weight(number):
            return number * 0.1
        weight(0)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            weight(step.number // 2)
        """,
    "scale.keywords scale": """
        def scaled(x, by):
            return x * by
        scale = functools.partial(scaled, by=1.0)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            scale = functools.partial(scaled, by=scale.keywords["by"] * 0.9)
        """,
    "first": """
        first = {}
        for step in run_steps(model=model, optimizer=optimizer):
            loss = update()
            first.setdefault("loss", loss)
            optimizer.param_groups[0]["lr"] = 0.1 * loss / first["loss"]
        """,
    "chosen": """
        class Config:
            pass
        chosen = Config()
        for step in run_steps(model=model, optimizer=optimizer):
            print(chosen)
            update()
            if step.number == 2:
                chosen = {"mix": 0.5}
        """,
    "ratio.first": """
        class Ratio:
            def of(self, loss):
                if not hasattr(self, "first"):
                    self.first = loss
                return loss / self.first
        ratio = Ratio()
        for step in run_steps(model=model, optimizer=optimizer):
            optimizer.param_groups[0]["lr"] = 0.1 * ratio.of(update())
        """,
    "first.cache_info()": """
        @functools.lru_cache(maxsize=None)
        def first(name):
            return float(model.get_parameter(name).detach().sum())
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            optimizer.param_groups[0]["lr"] = 0.1 + 0.01 * first("0.bias")
        """,
    "model.0.weight.scale model.0.bias.scale": """
        for p in model[0].parameters():
            p.scale = 1.0
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            for p in model[0].parameters():
                p.grad.mul_(p.scale)
                p.scale *= 0.95
        """,
    "current": """
        other = torch.optim.Adam(model.parameters())
        current = other
        for step in run_steps(model=model, optimizer=optimizer, other=other):
            update()
            current.step()
            if step.number == 3:
                current = optimizer
        """,
    "nets": """
        twin = copy.deepcopy(model)
        nets = {"fast": model, "slow": twin}
        for step in run_steps(model=model, optimizer=optimizer, twin=twin):
            update()
            if step.number % 3 == 0:
                nets["fast"], nets["slow"] = nets["slow"], nets["fast"]
        """,
    "heads": """
        heads = [model[0], model[2]]
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            heads.append(heads.pop(0))
        """,
    "control.rate": """
        class Control:
            def __init__(self):
                self.rate = self.before
            def before(self, loss):
                self.rate = self.after
                return 0.1
            def after(self, loss):
                return 0.01
        control = Control()
        for step in run_steps(model=model, optimizer=optimizer):
            optimizer.param_groups[0]["lr"] = control.rate(update())
        """,
    "model.cfg": """
        model.cfg = {"temperature": 1.0}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            model.cfg["temperature"] *= 0.95
        """,
    "model.history": """
        model.history = []
        for step in run_steps(model=model, optimizer=optimizer):
            model.history.append(update())
            optimizer.param_groups[0]["lr"] = 0.1 * sum(model.history) / len(model.history)
        """,
    "criterion.beta": """
        criterion = nn.SmoothL1Loss()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            criterion(torch.ones(1), torch.zeros(1))
            if step.number == 3:
                criterion.beta = 0.1
        """,
    "teacher.training teacher.0.training teacher.1.training": """
        teacher = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)).eval()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            teacher(torch.ones(2, 4))
            if step.number == 3:
                teacher.train()
        """,
    "cells": """
        cells = np.array([0.0, torch.zeros(())], dtype=object)
        for step in run_steps(model=model, optimizer=optimizer):
            cells[0] = 0.9 * cells[0] + update()
        """,
    "tick": """
        tick = itertools.count().__next__
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + tick())
        """,
    "phase": """
        import enum
        Phase = enum.Enum("Phase", "WARM MAIN", module=__name__)
        phase = Phase.WARM
        for step in run_steps(model=model, optimizer=optimizer):
            if phase is Phase.MAIN:
                update()
            if update() < 9 and step.number > 2:
                phase = Phase.MAIN
        """,
    "long": """
        long = [0.0] * 5000
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            long[100 * step.number] += 1.0
        """,
    "active": """
        active = {1}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            active = {number + 1 for number in active}
        """,
    "grid(made)": """
        def grid(size, made={}):
            if size not in made:
                made[size] = torch.ones(size)
            return made[size]
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            print(grid(4).sum())
        """,
    "Node.ids": """
        class Node:
            ids = itertools.count()
            def __init__(self):
                self.name = next(self.ids)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            Node()
        """,
    "counts": """
        counts = collections.Counter()
        counts["a"] += 1
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            counts["a"] += 1
        """,
    "args.mix": """
        import argparse
        args = argparse.Namespace(mix=1.0)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            args.mix *= 0.97
        """,
}
HARMLESS = {
    "constants of classes and files": """
        import ema_util
        class CFG:
            mix, names, weight = 0.5, ["a"], torch.ones(2)
            class Opt:
                lr = 0.1
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            print(CFG.mix, CFG.weight.sum(), CFG.Opt.lr, ema_util.decay)
        """,
    "a logger, a parser's results and a number of a State's class": """
        import argparse, logging
        log = logging.getLogger("recipe")
        args = argparse.Namespace(lr=0.1)
        class Net(nn.Module):
            temperature = 1.0
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)
        net = Net()
        for step in run_steps(model=model, optimizer=optimizer, net=net):
            log.info("step %s", args.lr)
            Net.temperature *= 0.9
            update()
        """,
    "a cache by key": """
        @functools.cache
        def mask(size):
            return torch.ones(size)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            print(mask(3).sum())
        """,
    "tuples that each pass makes": """
        for step in run_steps(model=model, optimizer=optimizer):
            stats = (update(), step.number)
            print(stats)
        """,
}


@pytest.mark.parametrize("path", REFUSED)
def test_tensors_and_iterators_in_such_a_place_are_refused_by_name(path, own_file):
    refused, _, _ = loops.outcome(REFUSED[path])
    assert refused.startswith(path), refused
    assert "no object of the State saves" in refused


@pytest.mark.parametrize("names", SAID)
def test_numbers_in_such_a_place_are_named(names, own_file):
    refused, changing, _ = loops.outcome(SAID[names])
    assert (refused, changing) == ("", set(names.removesuffix(" from a file").split()))


@pytest.mark.parametrize("habit", HARMLESS)
def test_what_stays_as_it_was_made_is_left_alone(habit, own_file):
    refused, changing, _ = loops.outcome(HARMLESS[habit])
    assert (refused, changing) == ("", set())


def test_a_function_that_a_loop_defines_keeps_its_defaults_in_the_next_pass_alone():
    """It is made again in each pass, with what it has for defaults."""
    recipe = """
        for step in run_steps(model=model, optimizer=optimizer):
            def loss(x, weight=torch.ones(1) * step.number):
                return x * weight
            loss(update())
        """
    assert loops.outcome(recipe) == ("", set(), set())
