"""Names that a recipe holds for parts of its objects act in a resumed run as in a calm one."""

import json

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

EVERY_STEP = ("--snapshot-every", "1", "--save-every", "1steps")


def test_names_for_parts_of_objects_belong_to_them_after_a_kill(drill, drills, recipes, tmp_path):
    """A group, an optimizer's state and the model's own weights, held by names from before the
    loop. The worker is killed in steps 3 and 6.
    """
    recipe, plan = recipes / "aliased.py", "step 3 rank 0 backward: kill; step 6 rank 0 backward: kill"
    drill.start(*EVERY_STEP, "--faults", plan, recipe=recipe).ends_with(0)
    calm = drills(tmp_path / "calm")
    calm.start(recipe=recipe).ends_with(0)

    assert len(drill.events("fault_injected")) == 2
    assert drill.events("run_finished")[0]["digest"] == calm.events("run_finished")[0]["digest"]


CUT = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset
import elastic

run = elastic.start(seed=0, global_batch=8, shards=8)
model = nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 5)).to(run.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = elastic.State(model=model, optimizer=optimizer)
data = TensorDataset(torch.randn(100, 13), torch.randint(5, (100,)))
for step in run.steps(run.data(data, epochs=1), state):
    step.log(places=str([each.data_ptr() % 64 for each in model.parameters()]))
    step.mean_loss(lambda batch: cross_entropy(model(batch.data[0]), batch.data[1]))
    optimizer.step()
    with torch.no_grad():
        vector = parameters_to_vector(model.parameters())
        vector *= min(1.0, 3.0 / float(vector.norm()))
        vector_to_parameters(vector, model.parameters())
"""


def test_parameters_that_were_cut_from_a_vector_begin_after_a_kill_where_they_did(drills, tmp_path):
    """Elsewhere products of matrices are rounded otherwise, and the digest differed."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(CUT)
    calm, stormy = drills(tmp_path / "calm"), drills(tmp_path / "stormy")
    calm.start(recipe=recipe).ends_with(0)
    plan = "step 5 rank 1 backward: kill; step 9 rank 0 backward: kill"
    stormy.start(*EVERY_STEP, "--nproc-per-node", "2", "--faults", plan, recipe=recipe).ends_with(0)

    assert len(stormy.events("fault_injected")) == 2
    expected, found = (
        [line["places"] for line in map(json.loads, each.run.metrics.read_text().splitlines())]
        for each in (calm, stormy)
    )
    assert found == expected
    assert expected[0] != expected[1]
    assert stormy.events("run_finished")[0]["digest"] == calm.events("run_finished")[0]["digest"]
