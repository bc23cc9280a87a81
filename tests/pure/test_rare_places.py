"""Places in which few loops keep something: each recipe changes one of them, as people write it."""

import pytest

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
