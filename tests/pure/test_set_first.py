"""Attributes that each pass of a loop sets before anything else reads them."""

import sys

from elastic.train.set_first import set_first


class Step:
    number = fraction = 1


class Agent:
    def __init__(self):
        self.rate = self.scale = 0


Step.__module__ = "elastic.train.step"


def test_what_a_pass_sets_first_from_the_step_is_found_in_a_function_too():
    """Python 3.13 stores the step and loads another variable in one instruction there."""
    found = []

    def steps():
        yield Step()
        frame = sys._getframe(1)
        found.extend(set_first(frame.f_code, frame.f_lasti, frame.f_locals))

    def loop(agent, other):
        for step in steps():
            agent.rate = step.fraction
            rate = step.number
            agent.scale = rate
            print(agent)
            other.rate = rate

    loop(Agent(), Agent())
    assert found == [("agent", "rate"), ("agent", "scale")]
