"""A step that is done again gives the bits of the first time, or the run ends with the sentence."""

import run_records

STEPS = 18
# Its loss depends on how often its loop ran, which a variable of the environment counts.
COUNTS = """
import os
import torch
from torch.utils.data import TensorDataset
import elastic

run = elastic.start(seed=3, global_batch=12, shards=6)
model = torch.nn.Linear(4, 1)
data = run.data(TensorDataset(torch.randn(36, 4)), steps=18)
for step in run.steps(data, elastic.State(model=model)):
    count = os.environ["COUNT"] = str(int(os.environ.get("COUNT", "0")) + 1)
    step.mean_loss(lambda batch: (model(batch.data[0]) - 0.01 * int(count)).square().mean())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.05 * parameter.grad)
"""


def test_hidden_memory_ends_the_run_at_the_step_that_reads_it(drill):
    """Killed in step 13, the run goes on from step 7, and the recipe has forgotten its count. No
    restart but that of the kill is used, and nothing of the other result is written down. The same
    command begins from that step, with lines of the first result, which count no more.
    """
    recipe = drill.folder / "recipe.py"
    recipe.write_text(COUNTS)
    options = ("--nproc-per-node", "3", "--snapshot-every", "off", "--save-every", "7steps")
    plan = ("--faults", "step 13 rank 0 backward: kill", "--max-restarts", "1")
    agent = drill.start(*options, *plan, recipe=recipe)
    agent.ends_with(1)

    assert "step 8 was done again from the state of step 7 and gave another result" in agent.output
    assert "keeps something outside its State" in agent.output
    assert agent.output.count("step 8 was done again from") == 1
    assert drill.values("generation_started", "cause", "restarts") == [("start", 0), ("failure", 1)]
    _, report = drill.inspects("report", drill.run.url)
    assert [(each["step"], each["restored"], each["excuse"]) for each in report["replays"]] == [(8, 7, "")]
    assert drill.last_step == 7
    assert max((step for (step,) in drill.values("checkpoint_committed", "step")), default=0) <= 7

    agent = drill.start(*options, recipe=recipe)
    agent.ends_with(0)
    assert drill.values("restored", "step")[-1] == (7,)
    assert "gave another result when it was done again, so that this need not be" in agent.output
    lines = run_records.lines(drill.run.metrics)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
