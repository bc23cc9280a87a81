"""A generation trains on the samples of the generations before it, or says that it cannot."""

import pytest

pytestmark = pytest.mark.process

KILLED = ("--snapshot-every", "1", "--faults", "step 5 rank 0 backward: kill")


def test_another_split_in_a_later_generation_ends_the_run(drill, recipes):
    """The first generation draws more numbers before the split, since a file is missing."""
    agent = drill.start(*KILLED, recipe=recipes / "splitting.py")
    agent.ends_with(2)
    assert "the state of step 4 was trained on other data" in agent.output
    assert "contents of dataset.indices" in agent.output
    assert "give a split a generator of its own" in agent.output
    assert drill.last_step == 4


def test_other_data_at_a_resume_are_refused(drill, reference, recipes):
    """The same command, and other settings that the recipe reads. First the data set has another
    length, and nothing is trained; then the run becomes longer, and ends as one that had this
    length from the start.
    """
    recipe = recipes / "weighed.py"
    drill.shut(9)
    drill.drains(drill.start(recipe=recipe, env={"WEIGHED": "14 70"}), 9)
    refused = drill.start(recipe=recipe, env={"WEIGHED": "14 80"})
    refused.ends_with(2)
    assert "samples (70 and 80), weights (" in refused.output
    assert f"elastic-train RECIPE --from {drill.run.url} --run-dir NEW" in refused.output
    assert drill.last_step == 9
    longer = drill.start(recipe=recipe, env={"WEIGHED": "16 70"})
    drill.ends_like(reference("weighed", recipe=recipe, env={"WEIGHED": "16 70"}), longer)
    assert "this run was to have 14 steps (3 epochs), and the recipe now asks for 16 (4)" in longer.output


BEST = """
import copy
import torch
import elastic

run = elastic.start(seed=0, global_batch=16, shards=4)
model, data = torch.nn.Linear(8, 2), torch.randn(64, 8)
best = copy.deepcopy(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sums = lambda batch: model(batch.data).sum()
for step in run.steps(run.data(data, epochs=1), elastic.State(model=model, optimizer=optimizer)):
    step.mean_loss(lambda batch: model(batch.data).square().mean())
    optimizer.step()
    run.evaluate(data, sums)
for ranks in [run.world_size, 1]:
    if run.rank < ranks:
        model.load_state_dict({name: each / ranks for name, each in best.items()})
    run.print("loaded by", ranks, run.evaluate(data, sums))
"""


def test_weights_that_one_rank_loads_alone_are_not_evaluated(drill):
    """A habit of scripts for DistributedDataParallel, which evaluate on rank 0."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(BEST)
    agent = drill.start("--nproc-per-node", "2", recipe=recipe)
    agent.ends_with(1)
    assert [
        line.split()[3] for line in agent.output.splitlines() if line.startswith("[rank0] loaded by")
    ] == ["2"]
    assert "run.evaluate: expected one result for a block, found others on ranks 0 and 1" in agent.output
    assert len(drill.events("generation_started")) == 1
