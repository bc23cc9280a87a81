"""Places in which few loops keep something: each recipe changes one of them, as people write it."""

import builtins
import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.pure import test_loop_memory as loops

LOOP = "for step in run_steps(model=model, optimizer=optimizer):"

SAID = {
    "C.scale.value": f"""
        class Decay:
            def __init__(self, value):
                self.value = value
            def __get__(self, thing, kind=None):
                return self.value
            def __set__(self, thing, value):
                self.value = value
        class C:
            scale = Decay(1.0)
        c = C()
        {LOOP}
            c.scale = 0.9 * c.scale
            update()
        """,
    "Meta.scale": f"""
        class Meta(type):
            scale = 1.0
        class C(metaclass=Meta):
            pass
        {LOOP}
            Meta.scale *= 0.9
            print(update() * C.scale)
        """,
    "done.is_set()": f"""
        import threading
        done = threading.Event()
        {LOOP}
            if not done.is_set():
                update()
            if step.number == 4:
                done.set()
        """,
    "scale.result()": f"""
        from concurrent.futures import Future
        def resolved(value):
            future = Future()
            future.set_result(value)
            return future
        scale = resolved(1.0)
        {LOOP}
            update()
            scale = resolved(0.9 * scale.result())
        """,
    "log.scale": f"""
        import logging
        log = logging.getLogger("recipe")
        log.scale = 1.0
        {LOOP}
            print(update() * log.scale)
            log.scale *= 0.9
        """,
    "cfg.scale": f"""
        import types
        cfg = types.ModuleType("cfg")
        cfg.scale = 1.0
        {LOOP}
            print(update() * cfg.scale)
            cfg.scale *= 0.9
        """,
}
HARMLESS = {
    "what a library counts for itself": f"""
        import logging
        handler = logging.NullHandler()
        {LOOP}
            update()
            handler.setLevel(step.number)
        """,
    "a running iterator over data that the step takes anew": f"""
        {LOOP}
            numbers = (number * number for number in range(4))
            print(next(numbers), update())
        """,
    "a future that each pass waits for": f"""
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(1)
        {LOOP}
            future = pool.submit(update)
            print(future.result())
        pool.shutdown()
        """,
}

PATCHED = {
    "torch.nn.functional.relu": f"""
        import torch.nn.functional as F
        {LOOP}
            if step.number == 3:
                F.relu = lambda x, inplace=False: F.gelu(x)
            update()
        """,
    "torch.nn.functional.gelu": f"""
        from torch.nn import functional
        {LOOP}
            if step.number == 3:
                setattr(functional, "gelu", torch.tanh)
            update()
        """,
    "class BatchNorm1d.forward": f"""
        def later():
            nn.BatchNorm1d.forward = lambda self, x: x
        {LOOP}
            if step.number == 3:
                later()
            update()
        """,
    "class SGD.step": f"""
        {LOOP}
            if step.number == 3:
                torch.optim.SGD.step = lambda self, closure=None: None
            update()
        """,
    "random.seed": f"""
        {LOOP}
            if step.number == 3:
                random.seed = lambda *_: None
            update()
        """,
    "math.own_exp": f"""
        {LOOP}
            if step.number == 3:
                math.own_exp = lambda x: 1.0
            update()
        """,
}
PATCHED_SAID = {
    "builtins.scale": f"""
        import builtins
        builtins.scale = 1.0
        {LOOP}
            print(update() * scale)
            builtins.scale *= 0.9
        """,
    "class Schedule.rate": f"""
        class Schedule:
            def rate(self):
                return 1.0
        schedule = Schedule()
        {LOOP}
            print(update() * schedule.rate())
            if step.number == 3:
                Schedule.rate = lambda self: 0.5
        """,
}


@pytest.fixture
def libraries():
    """What the recipes here replace is put back, and what they add is removed."""
    held = [
        (each, dict(vars(each)))
        for each in (functional, nn.BatchNorm1d, torch.optim.SGD, random, math, builtins)
    ]
    yield
    for each, before in held:
        for name in vars(each).keys() - before.keys():
            delattr(each, name)
        for name, value in before.items():
            if vars(each)[name] is not value:
                setattr(each, name, value)


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("name", PATCHED)
def test_a_function_that_the_loop_puts_into_a_library_is_refused_by_name(name, form, libraries):
    refused, _, _ = loops.outcome(PATCHED[name], form=form)
    assert refused.startswith(f"{name} was changed between step 3 and step 4"), refused
    assert refused.endswith(
        "replace it before the loop, as every process does then; or, for some calls alone, put it back in the same step"
    )


@pytest.mark.parametrize("name", PATCHED_SAID)
def test_a_number_in_a_library_and_a_method_of_a_class_are_named(name, libraries):
    refused, changing, _ = loops.outcome(PATCHED_SAID[name])
    assert (refused, changing) == ("", {name})


def test_a_function_that_is_replaced_before_the_loop_or_put_back_in_the_step_is_left_alone(libraries):
    recipe = f"""
        import torch.nn.functional as F
        F.relu = lambda x, inplace=False: F.gelu(x)
        gelu = F.gelu
        {LOOP}
            F.gelu = torch.tanh
            update()
            F.gelu = gelu
        """
    assert loops.outcome(recipe) == ("", set(), set())


@pytest.mark.parametrize("name", SAID)
def test_a_number_in_a_rare_place_is_named(name):
    refused, changing, _ = loops.outcome(SAID[name])
    assert (refused, changing) == ("", {name})


@pytest.mark.parametrize("habit", HARMLESS)
def test_what_no_later_step_reads_of_a_rare_place_is_left_alone(habit):
    refused, changing, _ = loops.outcome(HARMLESS[habit])
    assert (refused, changing) == ("", set())


def test_what_a_generator_keeps_between_two_sends_is_refused_with_its_name():
    """It waits at the same place in each pass; only its variable has changed."""
    recipe = f"""
        def decay():
            scale = 1.0
            while True:
                yield scale
                scale *= 0.9
        scales = decay()
        next(scales)
        {LOOP}
            print(update() * scales.send(None))
        """
    refused, _, _ = loops.outcome(recipe)
    assert refused.startswith("scales (its scale) was changed between step"), refused
    assert "keep the number in elastic.Values" in refused
