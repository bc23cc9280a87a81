"""What surrounds a recipe, such as string hashing and variables, acts as under plain python."""

import sys

import pytest

from elastic.agent.preflight import declared_identity
from elastic.config.environment import HASH_SEED
from elastic.errors import CannotStart

DECLARES = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1, help="passes over the data")
parser.add_argument("--dies", action="store_true")
if parser.parse_args().dies:
    os.kill(os.getpid(), 9)
import elastic
elastic.start(seed=3, global_batch=64, shards=4)
raise SystemExit("a preflight goes no further than start")
"""


def test_a_preflight_ends_at_the_start_and_takes_help_and_deaths(fork_server, tmp_path, capfd, monkeypatch):
    """Nothing else happens: no folder, no output, no line after `start`. Variables that another
    launcher left behind say nothing of this run. `-- --help` ends well without a declaration. A
    recipe that is killed, as by the kernel where memory is short, made no mistake.
    """
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("RANK", "many")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(DECLARES)
    identity = declared_identity(fork_server, recipe, ("--epochs", "2"))
    assert (identity.recipe, identity.arguments) == ("recipe.py", ("--epochs", "2"))
    assert (identity.seed, identity.global_batch, identity.shards) == (3, 64, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.py"]
    with pytest.raises(CannotStart, match="was killed before it had reached"):
        declared_identity(fork_server, recipe, ("--dies",))
    assert "".join(capfd.readouterr()) == ""
    with pytest.raises(SystemExit) as stop:
        declared_identity(fork_server, recipe, ("--help",))
    assert stop.value.code == 0
    assert "passes over the data" in capfd.readouterr().out


SETTINGS = """
import os, sys
print("torch" in sys.modules, file=open("SEEN", "a"))
os.environ["OMP_NUM_THREADS"] = "2"
import torch, elastic
elastic.start(seed=3, global_batch=8, shards=4)
"""


def test_settings_at_the_top_of_a_recipe_act_as_under_python(fork_server, tmp_path, capfd):
    """Torch, which the fork server has imported, reads the variable when it is imported: from the
    second preflight on, no process inherits anything.
    """
    recipe, seen = tmp_path / "recipe.py", tmp_path / "seen"
    recipe.write_text(SETTINGS.replace("SEEN", str(seen)))
    try:
        assert declared_identity(fork_server, recipe, ()).threads == 2
    finally:
        fork_server.preload(())
    assert seen.read_text() == "True\nFalse\n"
    said = capfd.readouterr().out
    assert "workers are spawned" in said and "OMP_NUM_THREADS changed before elastic.start" in said


def drawn(text):
    return {line[line.index("drawn") :] for line in text.splitlines() if "drawn 0." in line}


def test_a_model_from_unseeded_draws_is_refused_others_are_alike(drill, recipes):
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
    assert both.output.count("model.weight has a hook on its gradient") == 1
    assert drawn(both.output) == drawn(alone.output) == drawn(node.output)


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


def test_torchscript_rounds_alike_in_a_process_that_goes_on(drills, tmp_path):
    """By itself it is compiled anew after its first calls in a process."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(SCRIPTED)
    calm, stormy = drills(tmp_path / "calm"), drills(tmp_path / "stormy")
    calm.start(recipe=recipe).ends_with(0)
    plan = ("--snapshot-every", "1", "--faults", "step 4 rank 0 forward: kill")
    stormy.start(*plan, recipe=recipe).ends_with(0)
    assert len(stormy.events("fault_injected")) == 1
    assert stormy.values("run_finished", "digest") == calm.values("run_finished", "digest")


def test_workers_hash_alike_and_the_job_is_recorded(drill, tmp_path):
    """The shell sets another hash seed, with which sets of strings would have another order on each
    node. A script without the library shows what a worker has in its environment.
    """
    recipe = tmp_path / "shows.py"
    recipe.write_text("import os\nprint('SEEN', os.environ['PYTHONHASHSEED'])\n")
    variables = {HASH_SEED: "1", "SLURM_JOB_ID": "14", "SLURM_ARRAY_TASK_ID": "3", "SLURMD_NODENAME": "gpu-7"}
    agent = drill.start("--nproc-per-node", "1", recipe=recipe, env=variables)
    agent.ends_with(0)
    assert "SEEN 0\n" in agent.output and "PYTHONHASHSEED is 0 in every run, not 1" in agent.output
    assert drill.values("node_scheduled", "job", "array_task", "host") == [("14", 3, "gpu-7")]
