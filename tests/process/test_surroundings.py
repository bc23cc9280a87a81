"""What surrounds a recipe, such as string hashing and variables, acts as under plain python."""

import json
import sys

import pytest

from elastic.config.interpreter import HASH_SEED

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

# Marks the installed one, which scikit-learn needs.
VENDORED = """
import sys
here = sys.path.pop(0)
del sys.modules["joblib"]
import joblib
joblib.WHERE = "vendored"
sys.path.insert(0, here)
"""


IMPORTS = "import elastic, torch.distributed as dist"
START = "run = elastic.start(seed=0, global_batch=4, shards=2)"


def digest(drill):
    (finished,) = drill.events("run_finished")
    return finished["digest"]


def test_groups_built_from_a_set_are_the_same_after_a_resume_by_another_agent(drills, tmp_path, recipes):
    """The shells of two agents set different hash seeds.

    The first one trains three steps and drains; the second one resumes with two workers. Each group
    has a rate of its own, so another order of the groups gives other weights.
    """
    calm, stormy = drills(tmp_path / "calm"), drills(tmp_path / "stormy")
    calm.start(recipe=recipes / "sets.py").ends_with(0)
    command = [sys.executable, "-m", "elastic.cli", str(recipes / "sets.py"), "--run-dir", stormy.run.url]
    stormy.execute(command, {HASH_SEED: "1", "SETS_STOPS": "3"}).ends_with(75)
    stormy.start("--nproc-per-node", "2", recipe=recipes / "sets.py").ends_with(0)
    assert digest(stormy) == digest(calm)


def test_settings_at_the_top_of_a_recipe_act_as_under_python_and_the_console_says_what_they_cost(
    drill, recipes, tmp_path
):
    """The recipe sets variables that torch and scikit-learn read when they are imported, and puts a
    folder with another joblib in front. The fork server has imported all three.
    """
    (tmp_path / "vendored").mkdir()
    (tmp_path / "vendored" / "joblib.py").write_text(VENDORED)
    agent = drill.start(recipe=recipes / "settings.py", arguments=(str(tmp_path / "vendored"),))
    agent.ends_with(0)
    (line,) = (line for line in agent.output.splitlines() if "workers are spawned" in line)
    assert "OMP_NUM_THREADS, SKLEARN_ASSUME_FINITE changed before elastic.start" in line
    assert "assume_finite True, joblib vendored, threads 2" in agent.output
    assert json.loads((drill.run.local / "run.json").read_text())["threads"] == 2


def drawn(text):
    return {line[line.index("drawn") :] for line in text.splitlines() if "drawn 0." in line}


def test_a_model_from_an_unseeded_generator_is_refused_and_other_draws_are_alike_in_all_processes(
    drill, recipes
):
    """Plain python, two workers and a preflight draw from the global generators before
    elastic.start. The model is built there as well: with a seed of the recipe's, and without.
    """
    early = recipes / "early.py"
    alone = drill.execute([sys.executable, str(early), "unseeded"], {"ELASTIC_RUN_DIR": drill.run.url})
    node = drill.start(recipe=early, arguments=("unseeded",))
    for process in (alone, node):
        process.ends_with(2)
        assert "expected no draw from torch's unseeded generator before elastic.start" in process.output
    assert not drill.run.local.exists()
    both = drill.start("--nproc-per-node", "2", recipe=early, arguments=("seeded",))
    both.ends_with(0)
    assert len(drawn(both.output)) == 1
    assert drawn(both.output) == drawn(alone.output) == drawn(node.output)


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_process_group_that_a_recipe_opens_is_refused_with_a_sentence(drill, place):
    """Left in by who ports a script. torch said that RANK is missing, or that it is done twice."""
    recipe, lines = drill.folder / "recipe.py", ["dist.init_process_group('gloo')", START]
    recipe.write_text("\n".join([IMPORTS, *(lines if place == "before" else lines[::-1])]))
    agent = drill.start("--nproc-per-node", "2", recipe=recipe)
    agent.ends_with(2)
    assert "expected a recipe without init_process_group, found a call of it; leave it out" in agent.output
    assert f"at {recipe}:{2 if place == 'before' else 3}: dist.init_process_group('gloo')" in agent.output
    assert "Traceback" not in agent.output


def test_a_wrapper_that_exchanges_gradients_is_refused_and_not_waited_for(drill, recipes):
    """Two workers with DistributedDataParallel would wait for each other for ever."""
    agent = drill.start("--nproc-per-node", "2", recipe=recipes / "early.py", arguments=("wrapped",))
    agent.ends_with(2)
    assert "expected a model without DistributedDataParallel" in agent.output
    assert len(drill.events("generation_started")) == 1


BACKGROUND = """
import queue, threading, elastic, torch
from torch.utils.data import TensorDataset

run = elastic.start(seed=3, global_batch=8, shards=4)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = elastic.State(model=model, optimizer=optimizer)
handed = queue.Queue(1)

def take():
    for step in run.steps(run.data(TensorDataset(torch.randn(16, 4)), epochs=2), state):
        handed.put(step)
    handed.put(None)

threading.Thread(target=take, daemon=True).start()
while (step := handed.get()) is not None:
    step.mean_loss(lambda batch: (model(batch.data[0]) - batch.data[0]).pow(2).mean())
    optimizer.step()
"""


def test_a_generator_in_the_background_is_refused_and_not_waited_for(drill, tmp_path):
    """Its thread ended with a traceback, and the main thread waited for the next step for ever."""
    (tmp_path / "background.py").write_text(BACKGROUND)
    agent = drill.start(recipe=tmp_path / "background.py")
    agent.ends_with(2)
    assert "ended without gradients" in agent.output
    assert "Traceback" not in agent.output


LOGGED = """
import elastic, torch
from torch.utils.data import TensorDataset

run = elastic.start(seed=3, global_batch=8, shards=4)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = elastic.State(model=model, optimizer=optimizer)
seen = {}

def loss_of(batch):
    seen["first"] = batch.data[0][0, 0].item()
    return (model(batch.data[0]) - batch.data[0]).pow(2).mean()

for step in run.steps(run.data(TensorDataset(torch.randn(16, 4)), epochs=2), state):
    step.mean_loss(loss_of)
    optimizer.step()
    step.log(part=seen["first"], rate=0.01)
"""


def test_a_number_of_one_ranks_shards_that_is_logged_is_named_once_in_a_run(drill, tmp_path):
    """The process after a killed worker does not say it once more."""
    (tmp_path / "logged.py").write_text(LOGGED)
    kill = ("--snapshot-every", "1", "--faults", "step 3 rank 0 backward: kill")
    agent = drill.start("--nproc-per-node", "2", *kill, recipe=tmp_path / "logged.py")
    agent.ends_with(0)
    assert agent.output.count("the ranks have logged other numbers for part,") == 1
    _, report = drill.inspects("report", drill.run.url)
    assert report["logged_by_rank"] == ["part"]


SCRIPTED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import elastic

@torch.jit.script
def penalty(w, x):
    y = torch.tanh(x @ w.t())
    z = torch.softmax(y * 1.7, -1)
    return (z * torch.log(z + 1e-6)).sum() + (y / (1 + y * y)).mean() + torch.layer_norm(y, [17]).exp().mean()

run = elastic.start(seed=0, global_batch=4, shards=4)
X = torch.randn(40, 13)
model = nn.Linear(13, 17)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
state = elastic.State(model=model, optimizer=optimizer)
for step in run.steps(run.data(TensorDataset(X), epochs=1), state):
    step.mean_loss(lambda batch: model(batch.data[0]).square().mean())
    w = model.weight.detach().clone().requires_grad_()
    model.weight.grad.add_(torch.autograd.grad(penalty(w, X), w)[0])
    optimizer.step()
"""


def test_a_function_of_torchscript_rounds_alike_in_a_process_that_goes_on(drills, tmp_path):
    """By itself it is compiled anew after its first calls in a process."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(SCRIPTED)
    calm, stormy = drills(tmp_path / "calm"), drills(tmp_path / "stormy")
    calm.start(recipe=recipe).ends_with(0)
    plan = ("--snapshot-every", "1", "--faults", "step 4 rank 0 forward: kill; step 7 rank 0 forward: kill")
    stormy.start(*plan, recipe=recipe).ends_with(0)
    assert len(stormy.events("fault_injected")) == 2
    assert digest(stormy) == digest(calm)
