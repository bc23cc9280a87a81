"""What a recipe's loop remembers outside its State, in the processes of a real run."""

import textwrap

import pytest

pytestmark = pytest.mark.process

HEADER = """
import copy
import torch
from torch import nn
from torch.utils.data import TensorDataset
import elastic

run = elastic.start(seed=0, global_batch=16, shards=4)
model = nn.Linear(4, 2)
data = run.data(TensorDataset(torch.randn(64, 4)), epochs=4)
state = elastic.State(model=model)

def update(step):
    loss = step.mean_loss(lambda batch: model(batch.data[0]).square().mean())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
    return loss
"""


def test_a_teacher_outside_the_state_ends_the_run_at_once_on_all_ranks(drill):
    """Two workers, each of which finds it; no restart follows."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(
        HEADER
        + textwrap.dedent("""
        teacher = copy.deepcopy(model)
        for step in run.steps(data, state):
            update(step)
            with torch.no_grad():
                teacher.weight.lerp_(model.weight, 0.1)
        """)
    )
    agent = drill.start("--nproc-per-node", "2", recipe=recipe)
    agent.ends_with(2)
    said = "teacher.weight was changed between step 1 and step 2, and no object of the State saves it"
    assert said in agent.output
    assert "State(..., teacher=teacher)" in agent.output
    assert len(drill.events("generation_started")) == 1


def test_numbers_of_the_loop_are_named_once_and_the_run_goes_on(drill):
    """Inside a function, so that the loop's variables are no globals."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(
        HEADER
        + textwrap.dedent("""
        def main():
            best = 9.0
            for number, step in enumerate(run.steps(data, state)):
                loss = update(step) + number
                best = min(best, loss)
            print(loss)

        main()
        """)
    )
    agent = drill.start("--nproc-per-node", "2", recipe=recipe)
    agent.ends_with(0)
    (found,) = drill.events("unsaved_variables")
    assert (sorted(found["changing"]), found["after_loop"]) == (["best", "number"], ["loss"])
    assert agent.output.count("no object of the State saves") == 1
