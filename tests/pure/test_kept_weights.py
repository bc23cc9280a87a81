"""Weights, masks and averages that a loop keeps, each as people write it, are no secret memory.

Where some passes leave as it was what others replace, a process that begins again has it as at the
top of the script. A place that is filled before each read is none of these.
"""

import pytest

from tests.pure import test_loop_memory as loops

KEPT = {
    "best": """
        lowest = math.inf
        for step in run_steps(model=model, optimizer=optimizer):
            loss = update() * (1 + step.number % 2)
            if loss < 10:
                lowest, best = loss, copy.deepcopy(model.state_dict())
        model.load_state_dict(best)
        """,
    "tracker.best['0.weight']": """
        class Tracker:
            def __init__(self):
                self.lowest, self.best = math.inf, None
            def update(self, loss, model):
                if loss < self.lowest:
                    self.lowest = loss
                    self.best = {name: each.clone() for name, each in model.state_dict().items()}
        tracker = Tracker()
        for step in run_steps(model=model, optimizer=optimizer):
            tracker.update(update() - step.number, model)
        model.load_state_dict(tracker.best)
        """,
    "tracker.best_model.0.weight": """
        class Tracker:
            best_loss, best_model = math.inf, None
            def update(self, loss, model):
                if loss < self.best_loss:
                    self.best_loss, self.best_model = loss, copy.deepcopy(model)
        tracker = Tracker()
        for step in run_steps(model=model, optimizer=optimizer):
            tracker.update(update() - step.number, model)
        torch.save(tracker.best_model, "/dev/null")
        """,
    "box.best['0.weight']": """
        class Box: pass
        box = Box()
        box.best = {name: each.clone() for name, each in model.state_dict().items()}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number % 2:
                box.best = {name: each.clone() for name, each in model.state_dict().items()}
        model.load_state_dict(box.best)
        """,
    "CFG.best['0.weight']": """
        class CFG:
            lowest, best = math.inf, None
        def keep(loss):
            if loss < CFG.lowest:
                CFG.lowest = loss
                CFG.best = copy.deepcopy(model.state_dict())
        for step in run_steps(model=model, optimizer=optimizer):
            keep(update() - step.number)
        model.load_state_dict(CFG.best)
        """,
    "ema.shadow['0.weight']": """
        class EMA:
            def __init__(self):
                self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}
            def update(self):
                for name, p in model.named_parameters():
                    average = 0.1 * p.data + 0.9 * self.shadow[name]
                    self.shadow[name] = average.clone()
        ema = EMA()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            ema.update()
        """,
    "model.0.weight.mask": """
        for p in model.parameters():
            p.mask = torch.ones_like(p)
        def prune():
            for p in model.parameters():
                if p.ndim > 1:
                    p.mask = (p.detach().abs() > p.detach().abs().mean()).float()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number % 2 == 0:
                prune()
            for p in model.parameters():
                p.data.mul_(p.mask)
        """,
    "masks['0.weight']": """
        masks = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number % 2 == 0:
                masks = {name: (p.abs() > 0.1).float() for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.data.mul_(masks[name])
        """,
    "saved": """
        saved = []
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number % 2 == 0:
                saved.append(copy.deepcopy(model.state_dict()))
        model.load_state_dict({k: sum(each[k] for each in saved) / len(saved) for k in saved[0]})
        """,
    "ensemble": """
        ensemble = []
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number % 2 == 0:
                ensemble.append(copy.deepcopy(model))
        torch.save(ensemble, "/dev/null")
        """,
}


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("path", KEPT)
def test_weights_that_some_passes_keep_outside_the_state_are_refused(path, form):
    """Also where they are only written to a file at the end: after a resume it would differ."""
    refused, _, _ = loops.outcome(KEPT[path], count=16, form=form)
    assert refused.startswith(path), refused
    assert "no object of the State saves" in refused


@pytest.mark.parametrize("path", ["best", "masks['0.weight']", "ema.shadow['0.weight']"])
def test_the_advice_for_weights_is_a_place_that_can_hold_them(path):
    """A copy of the model, whose counts stay tensors, and not a dict of tensors."""
    refused, _, _ = loops.outcome(KEPT[path], count=16)
    assert "kept.load_state_dict(model.state_dict())" in refused
    assert "elastic.Values(name=tensor)" not in refused


FILLED_FIRST = {
    "an attribute that each call of its method fills before it reads it": """
        class Evaluator:
            def fill(self):
                for _ in range(2):
                    self.outputs = model(torch.randn(8, 4)).detach()
            def total(self):
                return self.outputs.sum()
        evaluator = Evaluator()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number % 2 == 0:
                evaluator.fill()
                evaluator.total()
        """,
    "an attribute that the loop fills before it reads it": """
        class Box: pass
        box = Box()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number % 2 == 0:
                box.outputs = model(torch.randn(8, 4)).detach()
                box.outputs.sum()
        """,
    "a picture that some calls of a method make, for what follows them": """
        class Pictures:
            def make(self, number):
                if number % 3:
                    return
                self.picture = model(torch.randn(8, 4)).detach()
                self.show()
            def show(self):
                return self.picture.sum()
        pictures = Pictures()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            pictures.make(step.number)
        """,
    "a mask that a method makes once": """
        class Mask:
            def __init__(self):
                self.mask = None
            def __call__(self, x):
                if self.mask is None:
                    self.mask = torch.ones(x.shape[1])
                return x * self.mask
        mask = Mask()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            mask(torch.randn(2, 4))
        """,
    "a cache of a method, by key": """
        class Positions:
            def __init__(self):
                self.cache = {}
            def of(self, size):
                if size not in self.cache:
                    self.cache[size] = torch.arange(size)
                return self.cache[size]
        positions = Positions()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            positions.of(step.number // 3)
        """,
    "outputs that each pass sets and the script prints": """
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            outputs = model(torch.randn(8, 4)).detach()
        print(outputs.shape)
        """,
}


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("habit", FILLED_FIRST)
def test_what_is_filled_before_each_read_is_not_refused(habit, form):
    assert loops.outcome(FILLED_FIRST[habit], count=16, form=form)[0] == ""


@pytest.mark.parametrize("value", ["step.number", "torch.ones(4) * step.number"])
@pytest.mark.parametrize("form", ["module", "function"])
def test_what_the_loop_alone_sets_in_some_passes_is_not_named(form, value):
    """Where it has no value after a restart, it raises a NameError: nothing is silent."""
    recipe = f"""
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            if step.number % 2 == 0:
                score = {value}
            if step.number % 2 == 0 and step.number > 2:
                seen = score + 1
        print(score)
        """
    assert loops.outcome(recipe, form=form) == ("", set(), set())
