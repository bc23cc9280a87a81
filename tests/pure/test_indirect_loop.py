"""Loops that Python's own functions write, and those that a recipe writes."""

import functools
import itertools
import sys

import pytest

from elastic.errors import UsageError
from elastic.train import indirect_loop


class Run:
    def steps(self):
        """Asks as the library does, from the generator."""
        indirect_loop.check(sys._getframe().f_back)
        yield from range(3)


run = Run()


def reduced():
    return functools.reduce(lambda scale, step: 0.9 * scale + step, run.steps(), 1.0)


def mapped():
    for loss in map(float, run.steps()):
        print(loss)


def listed():
    return list(map(float, run.steps()))


def accumulated():
    for total in itertools.accumulate(
        run.steps(),
        lambda total, step: total + step,
    ):
        print(total)


REFUSED = {"reduce": reduced, "map": mapped, "list of map": listed, "accumulate": accumulated}


@pytest.mark.parametrize("form", REFUSED)
def test_a_loop_that_another_function_writes_is_refused_with_its_name(form):
    name = form.rpartition(" ")[2]
    with pytest.raises(
        UsageError, match=rf"given to {name}\(\.\.\.\).*write the loop as `for step in run\.steps"
    ):
        REFUSED[form]()


def plain():
    return [step for step in run.steps()]  # noqa: C416 - a loop


def counted():
    return [number for number, _ in enumerate(run.steps())]


def zipped():
    return list(zip(run.steps(), map(float, range(3)), strict=False))


@pytest.mark.parametrize("loop", [plain, counted, zipped])
def test_a_loop_that_the_recipe_writes_is_left_alone(loop):
    assert len(loop()) == 3
