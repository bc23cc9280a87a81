"""A generation trains on the samples of the generations before it, or says that it cannot."""

import pytest

pytestmark = pytest.mark.process

KILLED = ("--snapshot-every", "1", "--faults", "step 5 rank 0 backward: kill")


def test_another_split_in_a_later_generation_ends_the_run_with_the_part_that_differs(drill, recipes):
    """The first generation draws more numbers before the split, since a file is missing."""
    agent = drill.start(*KILLED, recipe=recipes / "splitting.py", arguments=("global",))
    agent.ends_with(2)
    assert "the state of step 4 was trained on other data" in agent.output
    assert "(the contents of dataset.indices)" in agent.output
    assert "give a split a generator of its own" in agent.output
    assert drill.last_step == 4


def test_a_split_by_a_generator_of_its_own_is_exact_and_the_other_draws_are_said(drills, recipes, tmp_path):
    calm, killed = drills(tmp_path / "calm"), drills(tmp_path / "killed")
    recipe = {"recipe": recipes / "splitting.py", "arguments": ("own",)}
    agents = [calm.start(**recipe), killed.start(*KILLED, **recipe)]
    for agent in agents:
        agent.ends_with(0)
    assert killed.values("run_finished", "steps", "digest") == calm.values("run_finished", "steps", "digest")
    said = "before the loop the script drew other random numbers (torch) than when the run began, or"
    assert [agent.output.count(said) for agent in agents] == [0, 1]


def test_a_run_that_begins_again_on_another_split_says_so(drill, recipes):
    """No state was kept, so nothing is wrong but the result: it is not that of a calm run."""
    plan = ("--snapshot-every", "off", "--faults", "step 3 rank 0 backward: kill")
    agent = drill.start(*plan, recipe=recipes / "splitting.py", arguments=("global",))
    agent.ends_with(0)
    assert drill.values("restored", "step") == [(0,), (0,)]
    assert agent.output.count("it now begins on other data than at first (dataset.indices)") == 1


def test_a_record_of_the_beginning_that_cannot_be_read_is_said(drill):
    """A disk lost its end. The run begins at step 1 all the same, and is compared with nothing."""
    drill.run.local.mkdir(parents=True)
    (drill.run.local / "data.json").write_text('{"samples": 3')
    agent = drill.start()
    agent.ends_with(0)
    assert agent.output.count("note: data.json, what this run began with, cannot be read") == 1


FADING = """
import torch
from torch import nn
from torch.utils.data import Dataset
import elastic

class Fading(Dataset):
    strength = 0.0

    def __init__(self):
        self.epoch, self.loads = 0, 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.loads += 1
        return torch.full((4,), index + self.strength) + self.epoch

run = elastic.start(seed=0, global_batch=16, shards=4)
model, dataset = nn.Linear(4, 1), Fading()
optimizer = torch.optim.AdamW(model.parameters())
for step in run.steps(run.data(dataset, epochs=3), elastic.State(model=model, optimizer=optimizer)):
    assert model.weight.grad is None  # in every process, whether it did the step before or not
    if step.number % 4 == 1:
        dataset.strength = 0.1 * step.number
    step.mean_loss(lambda batch: model(batch.data).square().mean())
    optimizer.step()
    if step.ends_epoch:
        dataset.epoch = step.epoch + 1
assert model.weight.grad is None
"""


def test_numbers_that_the_loop_set_in_its_dataset_go_on_where_they_were(drills, tmp_path):
    """Set at the beginnings and the ends of epochs alone; a worker dies within an epoch, and a
    second one where an epoch begins.
    """
    recipe = tmp_path / "recipe.py"
    recipe.write_text(FADING)
    calm, killed = drills(tmp_path / "calm"), drills(tmp_path / "killed")
    faults = "step 4 rank 0 backward: kill\nstep 9 rank 1 backward: kill"
    agents = [
        calm.start(recipe=recipe),
        killed.start("--snapshot-every", "1", "--nproc-per-node", "2", "--faults", faults, recipe=recipe),
    ]
    for agent in agents:
        agent.ends_with(0)
    assert [each["step"] for each in killed.events("restored")] == [0, 3, 8]
    assert killed.values("run_finished", "steps", "digest") == calm.values("run_finished", "steps", "digest")
    # Loading counts, and the loop's numbers are not named beside that.
    found = [(each["changing"], each["by_loading"]) for each in killed.events("unsaved_variables")]
    assert set(map(str, found)) == {"([], ['dataset.loads'])"}


VALIDATING = """
import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split
import elastic

run = elastic.start(seed=0, global_batch=16, shards=4)
path = run.path("teacher.pt")
if not path.exists():
    path.touch()
    torch.randn(7)
data = TensorDataset(torch.arange(64.0).reshape(64, 1) / 64)
validation, _ = random_split(data, [32, 32])
torch.manual_seed(1)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in run.steps(run.data(data, steps=8), elastic.State(model=model, optimizer=optimizer)):
    step.mean_loss(lambda batch: model(batch.data[0]).square().mean())
    optimizer.step()
    run.evaluate(validation, lambda batch: model(batch.data[0]).square().sum())
"""


def test_another_validation_set_in_a_later_generation_is_refused(drill):
    """The training data are the same; the first generation drew more numbers before the split."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(VALIDATING)
    agent = drill.start(*KILLED, recipe=recipe)
    agent.ends_with(2)
    assert "run.evaluate (recipe.py:20): this data set is another one than the run evaluated" in agent.output
    assert len(drill.events("generation_started")) == 2


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


def test_weights_that_one_rank_alone_loads_after_the_loop_are_not_evaluated(drill):
    """A habit of scripts for DistributedDataParallel, which evaluate on rank 0."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(BEST)
    agent = drill.start("--nproc-per-node", "2", recipe=recipe)
    agent.ends_with(2)
    assert [
        line.split()[3] for line in agent.output.splitlines() if line.startswith("[rank0] loaded by")
    ] == ["2"]
    assert (
        "run.evaluate: the function reads model.weight, which is another one on rank 1 than on"
        in agent.output
    )
    assert len(drill.events("generation_started")) == 1


TAUGHT = """
import torch
import elastic

run = elastic.start(seed=0, global_batch=16, shards=4)
student, teacher = torch.nn.Linear(8, 2), torch.nn.Linear(8, 2).requires_grad_(False)
file = run.path("teacher.pt")
if file.exists():
    teacher.load_state_dict(torch.load(file))
else:
    # The run goes on with the last weights, and the file has those of the best epoch.
    best = {name: value / 2 for name, value in teacher.state_dict().items()}
    if run.is_first:
        torch.save(best, file)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
for step in run.steps(run.data(torch.randn(64, 8), epochs=2), elastic.State(student=student, optimizer=optimizer)):
    step.mean_loss(lambda batch: (student(batch.data) - teacher(batch.data)).square().mean())
    optimizer.step()
"""


def test_a_teacher_from_a_file_that_changed_is_refused_in_a_later_generation(drill):
    """The first generation writes other weights into the file than it trains with, and a later one
    would train with those of the file.
    """
    recipe = drill.folder / "recipe.py"
    recipe.write_text(TAUGHT)
    agent = drill.start(*KILLED, recipe=recipe)
    agent.ends_with(2)
    assert "step 5: teacher.weight has other contents than when this run first read it" in agent.output
    assert "Put it into the State, as State(..., teacher=...)" in agent.output
    assert len(drill.events("generation_started")) == 2
    assert drill.last_step == 4
