"""Weights that hooks of torch compute from parameters, read by the loop and after it."""

import pytest

pytestmark = pytest.mark.process

RECIPE = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune, spectral_norm, weight_norm
from torch.utils.data import TensorDataset
import elastic

run = elastic.start(seed=0, global_batch=12, shards=3)
X = torch.randn(48, 6)
model = nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.ReLU(), spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
prune.identity(model[3], "weight")
critic = weight_norm(nn.Linear(2, 1))  # no forward calls it in the first steps
optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=0.1, momentum=0.9)
state = elastic.State(model=model, critic=critic, optimizer=optimizer)
for step in run.steps(run.data(TensorDataset(X, (X.sum(1) > 0).long()), epochs=3), state):
    if step.number % 3 == 1:
        with torch.no_grad():
            critic.bias.add_(0.1 * model[0].weight.norm() + 0.1 * model[2].weight.norm() + critic.weight.sum())
            model[3].weight_mask.copy_((model[3].weight.abs() > 0.1).float())
    step.mean_loss(
        lambda batch: cross_entropy(model(batch.data[0]), batch.data[1])
        + (critic(model(batch.data[0])).square().mean() if step.number > 6 else 0)
    )
    optimizer.step()
if run.is_first:
    with torch.no_grad():
        seen = [layer.weight.double().sum().item() for layer in (model[0], model[2], model[3], critic)]
    run.path("seen").write_text(repr(seen))
"""


def test_loop_and_script_read_the_weight_of_the_current_parameters_in_every_process(drills, tmp_path):
    """A worker dies just before the loop reads the weights, and another one after the last step:
    the process after that one does no step, and writes what it was restored to.
    """
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    calm, stormy = drills(tmp_path / "calm"), drills(tmp_path / "stormy")
    plan = "step 7 rank 1 backward: kill; step 12 rank 0 after-snapshot: kill"
    agents = [
        calm.start(recipe=recipe),
        stormy.start("--nproc-per-node", "2", "--snapshot-every", "1", "--faults", plan, recipe=recipe),
    ]
    for agent in agents:
        agent.ends_with(0)

    assert len(stormy.events("fault_injected")) == 2
    (expected,), (found,) = (each.values("run_finished", "steps", "digest") for each in (calm, stormy))
    assert found == expected
    assert (tmp_path / "stormy/run/seen").read_text() == (tmp_path / "calm/run/seen").read_text()
