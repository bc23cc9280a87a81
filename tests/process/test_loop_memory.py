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
    """Two workers, each of which finds it; one of them says it, and so does the last line."""
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
    assert agent.output.count(said) == 2
    assert agent.output.count(f"error: {said}") == 1
    logs = [log.read_text() for log in drill.run.logs.glob("*/rank*.log")]
    assert sorted(f"error: {said}" in log for log in logs) == [False, True]
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
                if number == 0:
                    first = loss
            print(loss, first)

        main()
        """)
    )
    agent = drill.start("--nproc-per-node", "2", recipe=recipe)
    agent.ends_with(0)
    found = drill.events("unsaved_variables")  # of each moment in which a state was kept
    assert sorted(name for each in found for name in each["changing"]) == ["best", "number"]
    assert not any(each["after_loop"] for each in found)
    assert agent.output.count("note: no object of the State saves") <= len(found)


def test_what_was_named_before_a_restart_is_not_named_again(drill):
    """Each process that took over said it once more; the last line names it anyway."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(
        HEADER
        + textwrap.dedent("""
        best = 9.0
        for step in run.steps(data, state):
            best = min(best, update(step))
            step.log(best=best)
        """)
    )
    plan = ("--snapshot-every", "1", "--faults", "step 8 rank 1 backward: kill")
    agent = drill.start("--nproc-per-node", "2", *plan, recipe=recipe)
    agent.ends_with(0)
    assert len(drill.events("generation_started")) == 2
    assert agent.output.count("note: no object of the State saves best") == 1


def test_steps_that_are_given_to_map_end_the_run_at_once(drill):
    recipe = drill.folder / "recipe.py"
    recipe.write_text(HEADER + "for loss in map(update, run.steps(data, state)):\n    print(loss)\n")
    agent = drill.start(recipe=recipe)
    agent.ends_with(2)
    assert "the steps of the run are given to map(...)" in agent.output
    assert len(drill.events("generation_started")) == 1


def test_a_file_that_an_earlier_step_wrote_and_a_later_one_reads_is_named(drill):
    """Best weights in a file. Its time is set to the beginning of the run: no test waits."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(
        HEADER
        + textwrap.dedent("""
        import os
        best = run.path("best.pt")
        began_ns = (best.parent / "run.json").stat().st_mtime_ns
        for step in run.steps(data, state):
            update(step)
            if step.number == 2:
                torch.save(model.state_dict(), best)
                os.utime(best, ns=(began_ns, began_ns))
            if step.number == 12:
                model.load_state_dict(torch.load(best))
        """)
    )
    agent = drill.start(recipe=recipe)
    agent.ends_with(0)
    (found,) = drill.events("unsaved_variables")
    assert (found["changing"], found["files"]) == ([], [str(drill.folder / "run" / "best.pt")])
    assert agent.output.count("which an earlier step has written") == 1


def test_a_picture_of_each_epochs_end_is_no_memory(drill):
    """Two ifs, of which the second implies the first: no process reads what another one made."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(
        HEADER
        + textwrap.dedent("""
        for step in run.steps(data, state):
            update(step)
            if step.number % 4 == 0:
                picture = model.weight.detach().clone()
            if step.number % 4 == 0 and run.is_first:
                torch.save(picture, run.path(f"{step.number}.pt"))
        """)
    )
    agent = drill.start("--snapshot-every", "1", "--faults", "step 6 rank 0 backward: kill", recipe=recipe)
    agent.ends_with(0)
    assert len(drill.events("generation_started")) == 2
    assert not drill.events("unsaved_variables") and "note:" not in agent.output


ENVIRONMENT = """
import numpy as np

class Environment:
    def reset(self, seed):
        self.rng, self.turns = np.random.default_rng(seed), 0
        self.at = self.rng.uniform(-1, 1, 4).astype("f4")

    def step(self):
        self.at, self.turns = self.at * np.float32(0.5), self.turns + 1

environment = Environment()

def play(batch):
    total = 0
    for _ in batch.indices:
        environment.reset(int(torch.randint(2**31, (1,))))
        while environment.turns < 3:
            total = total + model(torch.from_numpy(environment.at)).square().sum()
            environment.step()
    return total / 16

for step in run.steps(data, state):
    step.backward(step.sum(play))
    with torch.no_grad():
        model.weight -= 0.1 * model.weight.grad
"""


@pytest.mark.parametrize("given", ["play", "lambda batch: play(batch)"])
def test_an_environment_that_each_call_resets_is_no_memory(drill, given):
    """As `env.reset(seed=...)`: the step's function is computed twice, and comes out the same."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(HEADER + ENVIRONMENT.replace("step.sum(play)", f"step.sum({given})"))
    agent = drill.start("--snapshot-every", "1", "--faults", "step 6 rank 0 backward: kill", recipe=recipe)
    agent.ends_with(0)
    assert len(drill.events("generation_started")) == 2
    assert not drill.events("unsaved_variables") and "note:" not in agent.output


def test_an_environment_that_goes_on_from_call_to_call_is_refused(drill):
    recipe = drill.folder / "recipe.py"
    recipe.write_text(
        HEADER + ENVIRONMENT.replace("default_rng(seed)", "default_rng(getattr(self, 'rng', seed))")
    )
    agent = drill.start(recipe=recipe)
    agent.ends_with(2)
    assert "step 1: environment.at changes with each call of the function" in agent.output


def test_a_cache_that_an_evaluation_fills_after_a_restart_is_not_the_loops_doing(drill):
    """The worker dies in the step that evaluates a part of the same files, at whose beginning the
    next one goes on: it has loaded nothing itself, since a loading process does.
    """
    recipe = drill.folder / "recipe.py"
    recipe.write_text(
        HEADER
        + textwrap.dedent("""
        class Files(torch.utils.data.Dataset):
            def __init__(self):
                self.cache = {}

            def __len__(self):
                return 80

            def __getitem__(self, index):
                if index not in self.cache:
                    self.cache[index] = torch.full((4,), float(index))
                return (self.cache[index],)

        files = Files()
        training, validation = (torch.utils.data.Subset(files, part) for part in (range(64), range(64, 80)))
        for step in run.steps(run.data(training, steps=10, workers=1), state):
            if step.number == 8 and not run.path("died").exists():
                run.path("died").touch()
                import os
                os.kill(os.getpid(), 9)
            update(step)
            if step.number % 8 == 0:
                run.evaluate(validation, lambda batch: model(batch.data[0]).sum())
        """)
    )
    agent = drill.start("--snapshot-every", "1", "--audit", "off", recipe=recipe)
    agent.ends_with(0)
    assert len(drill.events("generation_started")) == 2


def test_a_number_that_the_loop_set_in_a_module_once_is_there_after_a_restart(drill):
    """The worker dies after the step that set it, and the next one begins behind that step."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(
        HEADER
        + textwrap.dedent("""
        model.drop = nn.Dropout(0.1)
        for step in run.steps(data, state):
            if step.number == 5:
                model.drop.p = 0.5
            assert model.drop.p == (0.5 if step.number >= 5 else 0.1)
            update(step)
            if step.number == 8 and not run.path("died").exists():
                run.path("died").touch()
                import os
                os.kill(os.getpid(), 9)
        """)
    )
    agent = drill.start("--snapshot-every", "1", recipe=recipe)
    agent.ends_with(0)
    assert len(drill.events("generation_started")) == 2
    assert drill.events("unsaved_variables") == []


def test_a_tensor_that_the_loop_changes_late_and_once_is_refused_before_a_state_is_kept(drill):
    """At step 21, between two rare looks, and the worker dies at step 23: another one, which began
    behind that step, would end the run with the tensor of the top of the script.
    """
    recipe = drill.folder / "recipe.py"
    recipe.write_text(
        HEADER.replace("epochs=4", "epochs=10")
        + textwrap.dedent("""
        bank = torch.zeros(2)
        for step in run.steps(data, state):
            update(step)
            with torch.no_grad():
                model.bias.add_(0.01 * bank)
            if step.number == 21:
                bank += 1
            if step.number == 23 and not run.path("died").exists():
                run.path("died").touch()
                import os
                os.kill(os.getpid(), 9)
        """)
    )
    agent = drill.start("--snapshot-every", "1", "--nproc-per-node", "2", recipe=recipe)
    agent.ends_with(2)
    assert "error: bank was changed between step 21 and step 22, and no object of the State" in agent.output
    assert len(drill.events("generation_started")) == 1


def test_what_a_forward_of_an_average_network_left_in_the_step_before_ends_the_run(drill):
    """Two workers, before any of them could die between two steps and begin without it."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(
        HEADER
        + textwrap.dedent("""
        class Average(nn.Module):
            hidden = None
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 2)
            def forward(self, x):
                self.hidden = self.layer(x)
                return self.hidden

        average, probe = Average().requires_grad_(False), torch.randn(3, 4)
        state = elastic.State(model=model, average=average)
        for step in run.steps(data, state):
            update(step)
            with torch.no_grad():
                if average.hidden is not None:
                    model.bias.add_(average.hidden.mean(0), alpha=0.01)
                average.layer.weight.lerp_(model.weight, 0.1)
            average(probe)
        """)
    )
    agent = drill.start("--nproc-per-node", "2", "--snapshot-every", "1", recipe=recipe)
    agent.ends_with(2)
    said = "step 4: the loop's body reads average.hidden, which the loop's body left there in step 3, and changes the State by it"
    assert agent.output.count(f"error: {said}") == 1
    assert len(drill.events("generation_started")) == 1


def test_what_changed_before_an_early_death_was_named_by_the_process_that_saw_it(drill):
    """The process that goes on sees no change: its script begins with the rate of the top."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(
        HEADER
        + textwrap.dedent("""
        rate = 1.0
        for step in run.steps(data, state):
            if step.number == 1:
                rate = 0.5
            step.log(rate=rate)
            update(step)
        """)
    )
    plan = ("--snapshot-every", "1", "--faults", "step 2 rank 0 forward: kill")
    agent = drill.start(*plan, recipe=recipe)
    agent.ends_with(0)
    assert len(drill.events("generation_started")) == 2
    (found,) = drill.events("unsaved_variables")
    assert found["changing"] == ["rate"]
    assert "at a restart rate began again as at the top of the script" in agent.output
