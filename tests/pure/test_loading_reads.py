"""What the dataset and collate read, and the loop changes: no variable of the loop leads there."""

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset

import elastic
from elastic.data import stale_copies
from elastic.errors import UsageError
from elastic.train.body_changes import BodyChanges
from elastic.train.dataset_settings import DatasetSettings
from elastic.train.module_settings import ModuleSettings
from tests.pure.test_loop_memory import outcome

DATA = """
from functools import partial
from types import SimpleNamespace

SIGMA, MEAN, cache, opts = 0.1, torch.zeros(4), {}, SimpleNamespace(sigma=0.1, name="a")

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        cache[index] = index
        return helped(torch.ones(4))

def helped(x):
    return x

def collate(samples):
    return torch.stack(samples) * SIGMA

data = Samples()
"""
LOOP = """
for step in run_steps(model=model, optimizer=optimizer, dataset=data, collate=collate, workers=WORKERS):
    BEFORE
    step.mean_loss(lambda batch: model(batch).mean())
    AFTER
"""


def loop(data="", before="pass", after="pass", workers=0, **options):
    text = LOOP.replace("BEFORE", before).replace("AFTER", after).replace("WORKERS", str(workers))
    return outcome(DATA + data + text, **options)


READS = {
    "by collate": "",
    "by the dataset": """
class Samples(Samples):
    def __getitem__(self, index):
        return torch.ones(4) * SIGMA
data, collate = Samples(), None
""",
    "by a helper": """
def helped(x):
    return x * SIGMA
collate = None
""",
    "by a transform of a dataset in a dataset": """
class Samples(torch.utils.data.Dataset):
    def __init__(self, data):
        self.inner, self.transform = data, lambda x: x * SIGMA
data, collate = torch.utils.data.Subset(Samples(data), [0]), None
""",
    "by a partial": """
def scaled(samples, by):
    return torch.stack(samples) * SIGMA * by
collate = partial(scaled, by=2)
""",
    "by a function of a method": """
class Collate:
    def __call__(self, samples):
        return self.scaled(samples)

    def scaled(self, samples):
        return torch.stack(samples) * SIGMA
collate = Collate()
""",
}


@pytest.mark.parametrize("reads", READS)
def test_a_number_that_only_the_code_which_loads_samples_reads_is_named(reads):
    """A curriculum by a global variable: the loop writes it in some steps and never reads it."""
    anneal = "if step.number == 5: SIGMA = 0.5"
    assert loop(READS[reads], before=anneal) == ("", {"SIGMA"}, set())


def test_a_number_that_each_step_sets_before_its_samples_are_loaded_is_not_named():
    """It is a function of the step, whichever process does it. After the load it is the next
    step's.
    """
    assert loop(before="SIGMA = 1 / step.number") == ("", set(), set())
    assert loop(after="SIGMA = 1 / step.number") == ("", {"SIGMA"}, set())


def test_a_tensor_that_only_collate_reads_is_refused():
    centred = """
def collate(samples):
    return torch.stack(samples) - MEAN
"""
    refused, _, _ = loop(centred, after="MEAN = torch.full((4,), float(step.number))")
    assert refused.startswith("MEAN was changed between step 1 and step 2")


def test_caches_that_loading_fills_and_what_it_does_not_read_are_not_named():
    """The dataset writes to `cache`. No variable of the loop leads to it, as in a real loop."""
    filled = "globals()['data'][step.number % 8]"
    assert loop(before=filled) == ("", set(), set())
    assert loop(before=f"{filled}; cache['loop'] = step.number") == ("", {"cache"}, set())
    assert loop(before="unread = step.number") == ("", set(), set())


@pytest.mark.parametrize("before", ["if step.number == 5: SIGMA = 0.5", "SIGMA = 1 / step.number"])
@pytest.mark.parametrize("reads", READS)
def test_what_the_loop_changes_for_loading_processes_is_refused_since_it_has_no_effect(reads, before):
    """Also where it is a function of the step: they copied it when they began."""
    refused, _, _ = loop(READS[reads], before=before, workers=2)
    assert ": the loop changed SIGMA and the data-loading processes (workers=2) do not see it" in refused


def test_an_attribute_that_loading_processes_do_not_read_may_change():
    scaled = """
def collate(samples):
    return torch.stack(samples) * opts.sigma
"""
    assert loop(scaled, after="opts.best = step.number", workers=2)[0] == ""
    assert "the loop changed opts.sigma and" in loop(scaled, after="opts.sigma /= 2", workers=2)[0]


def test_parts_of_a_dataset_whose_numbers_are_saved_are_not_named():
    """The loop's variable leads to a part of a ConcatDataset, whose numbers come back."""
    parts = """
class Samples(Samples):
    sigma, scale = 0.1, 1.0
parts = [Samples(), Samples()]
data, collate = torch.utils.data.ConcatDataset(parts), None
"""
    change = "parts[0].sigma = step.number"
    assert loop(parts, before=change) == ("", set(), set())
    assert loop(parts, before=change + "; Samples.scale = step.number") == ("", set(), set())


READ_AHEAD = {
    "values": """
values = elastic.Values(hard=0)
class Samples(Samples):
    def __getitem__(self, index):
        return torch.ones(4) * values.hard
data, collate = Samples(), None
""",
    "dataset.values": """
values = elastic.Values(hard=0)
data.values = values
""",
    "model": """
values = elastic.Values(hard=0)
def collate(samples):
    return model(torch.stack(samples)).detach()
""",
    "step": """
values = elastic.Values(hard=0)
def collate(samples):
    return torch.stack(samples) * step.number
""",
}


@pytest.mark.parametrize("name", READ_AHEAD)
def test_what_loading_processes_read_of_the_run_is_refused_where_it_changes(name):
    """Saved objects and the step's number: a process that begins after a restart has others."""
    text = LOOP.replace("collate=collate,", "collate=collate, values=values,")
    text = text.replace("BEFORE", "values.hard = step.number").replace("AFTER", "update()")
    for workers in (0, 2):
        refused, _, _ = outcome(DATA + READ_AHEAD[name] + text.replace("WORKERS", str(workers)))
        assert (f"the loop changed {name} and the data-loading processes" in refused) == bool(workers)


class Trainer:
    def __init__(self):
        self.sigma, self.best = 0.1, 9.0

    def scaled(self, samples):
        return torch.stack(samples) * self.sigma

    def collate(self, samples):
        return self.scaled(samples)


def test_what_a_method_that_collates_reads_of_its_object_is_refused_where_processes_load():
    """The loop's other attributes of the same object may change."""
    trainer = Trainer()
    before = stale_copies.attributes_of_method(trainer.collate)
    trainer.best = 1.0
    stale_copies.check(before, stale_copies.attributes_of_method(trainer.collate), set(), 2, 1)
    trainer.sigma = 0.5
    with pytest.raises(UsageError, match=r"changed Trainer\.sigma, which was 0.1 and is 0.5, and the data-"):
        stale_copies.check(before, stale_copies.attributes_of_method(trainer.collate), set(), 3, 1)


TRAINER = """
class Samples(Samples):
    def relabel(self):
        self.labels = model(torch.ones(8, 4))
data = Samples()

class Trainer:
    def __init__(self):
        self.sigma, self.losses = 0.1, []

    def scaled(self, samples):
        return torch.stack(samples) * SIGMA

    def collate(self, samples):
        return self.scaled(samples)

    def train(self):
        for step in run_steps(
            model=model, optimizer=optimizer, dataset=data, collate=self.collate, workers=2
        ):
            CHANGE
            step.mean_loss(lambda batch: model(batch).mean())
            self.losses.append(update())

Trainer().train()
"""


def test_a_trainer_whose_method_collates_is_no_code_that_loads_samples():
    """Nor is a method of the dataset that loading does not call: both read the model."""
    assert outcome(DATA + TRAINER.replace("CHANGE", "pass"))[0] == ""
    changed = TRAINER.replace("CHANGE", "globals().update(SIGMA=step.number)")
    assert "the loop changed SIGMA and the data-loading" in outcome(DATA + changed)[0]


NO_EFFECT = {
    "dataset": "data = Samples()",
    "collate": "collate = lambda samples: samples",
    "order": "order = lambda epoch: range(8)",
    "weights": "weights = [2.0] * 8",
}
CHOSEN = """
weights, order = [1.0] * 8, lambda epoch: range(8)
for step in run_steps(
    model=model, optimizer=optimizer, dataset=data, collate=collate, weights=weights, order=order
):
    if step.number == 3:
        CHANGE
"""


@pytest.mark.parametrize("argument", NO_EFFECT)
@pytest.mark.parametrize("form", ["module", "function"])
def test_another_object_in_a_variable_that_run_data_was_given_is_refused(argument, form):
    """`dataset = reload()`: the next steps would go on with the former one, unsaid."""
    refused, _, _ = outcome(DATA + CHOSEN.replace("CHANGE", NO_EFFECT[argument]), form=form)
    assert f"than the one that run.data was given as its {argument}, which has no effect" in refused
    assert refused.startswith("step 4: ")


def test_weights_that_the_loop_changes_in_place_are_refused():
    for change in ("weights[2] = 9.0", "weights[:] = [2.0] * 8"):
        refused, _, _ = outcome(DATA + CHOSEN.replace("CHANGE", change))
        assert "the loop has changed the weights that run.data was given, which has no effect" in refused


def test_a_name_that_means_something_else_later_is_no_other_data():
    for change in ("weights = 1.0", "weights = [1.0] * 3", "data = None", "order = 'descending'"):
        assert outcome(DATA + CHOSEN.replace("CHANGE", change))[0] == ""


class Noise:
    def __init__(self):
        self.sigma = 0.1

    def __call__(self, samples):
        return samples


class Noisy(Dataset):
    def __init__(self):
        self.augment = Noise()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.augment(torch.ones(1))


def plain_collate(samples):
    return torch.stack(samples) * plain_collate.sigma


plain_collate.sigma = 0.1


def test_numbers_of_an_object_that_collates_or_augments_come_back_at_a_resume():
    """`collate.sigma = 0.5` and `dataset.augment.sigma = 0.5` in some step."""
    for collate in (Noise(), plain_collate):
        dataset = ConcatDataset([Noisy()])
        settings = DatasetSettings(dataset=dataset, collate=collate)
        collate.sigma = dataset.datasets[0].augment.sigma = 0.5
        saved = settings.changed()
        assert saved == {"collate.sigma": "0.5", "dataset.datasets[0].augment.sigma": "0.5"}
        other, collate.sigma = ConcatDataset([Noisy()]), 0.1
        DatasetSettings(dataset=other, collate=collate).put_back(saved, "NEW_RUN")
        assert (collate.sigma, other.datasets[0].augment.sigma) == (0.5, 0.5)
    plain_collate.sigma = 0.1


def test_an_attribute_of_collate_that_loading_processes_do_not_see_is_refused():
    dataset, collate = Noisy(), Noise()
    before = stale_copies.attributes_of(dataset, collate)
    collate.sigma = 0.5
    with pytest.raises(UsageError, match=r"changed collate\.sigma, which was 0.1 and is 0.5, and the data-"):
        stale_copies.check(before, stale_copies.attributes_of(dataset, collate), set(), 2, 1)


def test_a_tensor_of_collate_that_the_loop_sets_in_some_steps_is_refused():
    collate, state = Noise(), elastic.State(net=torch.nn.Linear(1, 1))
    settings = ModuleSettings(state=state)
    body = BodyChanges(state=state, dataset=Noisy(), settings=settings, collate=collate)
    body.before_loop()
    for step in range(1, 4):
        body.begin(step)
        body.before_loading(step)
        body.after_gradients()
    body.begin(4)
    collate.means = torch.ones(1)
    with pytest.raises(UsageError, match=r"step 4: the loop has changed collate\.means, a Tensor, which no"):
        body.before_loading(4)
