"""What a loop's body sets in some steps is found; what it sets in each step is not, nor what a
forward leaves.

`play` goes through the moments of each step as the loop does: the body's head, the batch, the
forward, and the body's tail.
"""

import array
import multiprocessing
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset

import elastic
from elastic.data.stale_copies import Attribute
from elastic.errors import UsageError
from elastic.train import dataset_contents
from elastic.train.body_changes import ALL_OF_FIRST, BodyChanges
from elastic.train.dataset_contents import DatasetContents
from elastic.train.dataset_settings import DatasetSettings
from elastic.train.module_settings import ModuleSettings

EPOCH = 5  # steps


class Samples(torch.utils.data.Dataset):
    shared: ClassVar = []

    def __init__(self):
        self.labels, self.kept, self.strength, self.cache = torch.zeros(4), [0], 0.0, {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1), Scale())
        self.temperature, self.mask, self.last, self.noise = 1.0, None, None, None

    def keep(self):
        self.last = torch.ones(2)


class Counting(Net):
    """Its state_dict has what it counts and collects."""

    def __init__(self):
        super().__init__()
        self.count, self.losses, self.words = 0, [], {"a": 0}

    def get_extra_state(self):
        return {"count": self.count, "losses": self.losses, "words": [self.words]}

    def set_extra_state(self, state):
        self.count, self.losses, (self.words,) = state["count"], state["losses"], state["words"]


class Scale(nn.Module):
    def forward(self, x):
        return x


class Recipe:
    """What happens at each moment; each case replaces one of them."""

    def __init__(self):
        self.net, self.data = Net(), Samples()
        self.optimizer = torch.optim.SGD(self.net.parameters())

    def head(self, step):
        pass

    def load(self, step):
        pass

    def forward(self, step):
        pass

    def tail(self, step):
        pass

    def evaluate(self, step):
        pass


def play(recipe, steps=3 * EPOCH, first=1, kept=(), **objects):
    """{step: names}. Raises what BodyChanges raises. kept: the steps whose states are."""
    Samples.shared = []
    state = elastic.State(net=recipe.net, o=recipe.optimizer, **objects)
    settings = ModuleSettings(state=state)
    of_data = DatasetSettings(dataset=recipe.data)
    body = BodyChanges(state=state, dataset=recipe.data, settings=settings, of_loading=of_data.of_loading)
    found = {}
    body.before_loop()
    for step in range(first, first + steps):
        names = body.begin(step)
        recipe.head(step)
        names += body.before_loading(step)
        of_data.before_loading()
        recipe.load(step)
        recipe.forward(step)
        of_data.after_loading()
        body.after_gradients()
        recipe.tail(step)
        body.read_body()
        recipe.evaluate(step)
        body.after_evaluation()
        names += body.at_end(step) if step in kept else []
        if names:
            found[step] = names
    return found


def case(**moments):
    recipe = Recipe()
    for name, function in moments.items():
        setattr(recipe, name, lambda step, function=function: function(recipe, step))
    return recipe


def at(wanted, do):
    return lambda recipe, step: do(recipe) if step == wanted else None


def set_labels(recipe):
    recipe.data.labels = torch.ones(4)


def set_mask(recipe):
    recipe.net.mask = torch.ones(2)


def swap(recipe):
    recipe.net.layers[1] = nn.Tanh()


def set_temperature(recipe):
    recipe.net.temperature *= 0.5


def hook(recipe):
    recipe.net.layers[0].register_forward_hook(lambda *_: None)


def reorder(recipe):
    reinsert(recipe.net.layers._modules)


def reinsert(parts):
    """The first one, behind all others."""
    name = next(iter(parts))
    parts[name] = parts.pop(name)


def other_forward(recipe):
    Scale.forward = lambda _, x: 2 * x


FOUND = {
    "a layer that is swapped": (case(head=at(7, swap)), {7: ["net.layers.1"]}),
    "a list of words": (case(head=at(6, lambda r: setattr(r.net, "mask", ["a"]))), {6: ["net.mask"]}),
    "what a method sets too, as a forward may": (case(tail=at(6, lambda r: r.net.keep())), {7: ["net.last"]}),
    "a hook": (case(tail=at(6, hook)), {7: ["net.layers.0._forward_hooks"]}),
    "a hook ahead of a module's backward": (
        case(tail=at(6, lambda r: r.net.layers[0].register_full_backward_pre_hook(lambda *_: None))),
        {7: ["net.layers.0._backward_pre_hooks"]},
    ),
    "a hook on a gradient": (
        case(tail=at(6, lambda r: r.net.layers[0].weight.register_hook(torch.sign))),
        {7: ["net.layers.0.weight._backward_hooks"]},
    ),
    "a second hook on a gradient": (
        case(
            head=lambda r, s: r.net.layers[0].weight.register_hook(torch.sign) if s in (1, 6) else None,
        ),
        {2: ["net.layers.0.weight._backward_hooks"]},
    ),
    "a layer that is taken out and put in again": (
        case(tail=at(6, reorder)),
        {7: ["net.layers._modules (their order)"]},
    ),
    "a parameter that is taken out and put in again": (
        case(head=at(6, lambda r: reinsert(r.net.layers[0]._parameters))),
        {6: ["net.layers.0._parameters (their order)"]},
    ),
    "a hook of an optimizer": (
        case(head=at(6, lambda r: r.optimizer.register_step_pre_hook(lambda *_: None))),
        {6: ["o._optimizer_step_pre_hooks"]},
    ),
    "a forward of its own": (
        case(head=at(6, lambda r: setattr(r.net, "forward", torch.sign))),
        {6: ["net.forward"]},
    ),
    "a forward of a class": (case(head=at(6, other_forward)), {6: ["class Scale.forward"]}),
    "a transform of the dataset": (
        case(tail=at(6, lambda r: setattr(r.data, "strength", nn.Tanh()))),
        {7: ["dataset.strength"]},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_the_body_sets_in_some_steps_is_named_once(name):
    recipe, expected = FOUND[name]
    assert play(recipe) == expected


LATE = 203


@pytest.mark.parametrize("kept", [[LATE], [LATE - 3, LATE + 2], range(1, 300)])
@pytest.mark.parametrize("moment", ["head", "tail"])
def test_a_layer_that_is_swapped_late_and_once_is_named_where_a_state_is_kept(moment, kept):
    """In a step that is not read: a process that begins behind it has no part in the swap."""
    found = play(case(**{moment: at(LATE, swap)}), steps=300, kept=kept)
    assert found == {next(step for step in kept if step >= LATE): ["net.layers.1"]}


@pytest.mark.parametrize("moment", ["head", "tail"])
def test_contents_of_the_dataset_that_are_set_late_and_once_are_refused(moment):
    """Before a state is kept from which another process would begin without them."""
    with pytest.raises(UsageError, match=rf"step {LATE}: .*dataset\.labels, a Tensor"):
        play(case(**{moment: at(LATE, set_labels)}), steps=LATE, kept=[LATE])


LATE_CHANGES = {
    "another": set_labels,
    "a longer list": lambda r: r.data.kept.append(1),
    "other contents": lambda r: r.data.labels.add_(1),
}


@pytest.mark.parametrize("change", LATE_CHANGES)
def test_what_loading_changes_late_for_the_first_time_is_not_the_loops_doing(change):
    """As the list of samples that could not be read, which is empty for a long time."""
    assert play(case(load=at(LATE, LATE_CHANGES[change])), steps=LATE + 1, kept=range(1, LATE + 1)) == {}


def test_what_each_step_sets_is_not_named_where_a_state_is_kept():
    noise = case(head=lambda r, s: setattr(r.net, "noise", torch.rand(1)))
    assert play(noise, steps=LATE, kept=range(50, LATE, 3)) == {}


REFUSED = {
    "labels at the beginning of an epoch": (
        case(head=lambda r, s: set_labels(r) if s % EPOCH == 1 else None),
        r"step 2: .*dataset\.labels, a Tensor",
    ),
    "labels at its end": (
        case(tail=lambda r, s: set_labels(r) if s % EPOCH == 0 else None),
        r"step 6: .*dataset\.labels",
    ),
    "labels changed in place": (case(tail=at(6, lambda r: r.data.labels.add_(1))), r"dataset\.labels"),
    "a list that grows": (
        case(tail=at(6, lambda r: r.data.kept.append(1))),
        r"step 7: .*dataset\.kept, a list",
    ),
    "a list of the class": (case(tail=at(6, lambda r: Samples.shared.append(1))), r"dataset\.shared"),
}


def other_class(recipe):
    recipe.net.layers[1].__class__ = nn.Tanh


@pytest.mark.parametrize("moment", ["head", "tail"])
@pytest.mark.parametrize(("step", "kept"), [(6, []), (LATE, [LATE])])
def test_a_class_that_the_body_gives_a_module_is_refused_by_name(moment, step, kept):
    """The module stays the same object, and its attributes too."""
    with pytest.raises(UsageError, match=r"step \d+: the loop has given net\.layers\.1 another class, Tanh"):
        play(case(**{moment: at(step, other_class)}), steps=LATE, kept=kept)


def test_a_class_that_a_forward_gives_is_left_alone():
    """As a lazy layer does, which takes its final class in its first forward."""
    assert play(case(forward=at(2, other_class))) == {}


def test_a_layer_that_is_swapped_a_second_time_by_one_of_another_class_is_not_refused():
    recipe = case(
        head=lambda r, s: (
            r.net.layers.__setitem__(1, {4: nn.Sigmoid, 7: nn.Tanh}[s]()) if s in (4, 7) else None
        )
    )
    assert play(recipe) == {4: ["net.layers.1"]}


@pytest.mark.parametrize("name", REFUSED)
def test_contents_of_the_dataset_that_the_body_sets_are_refused(name):
    """A process that begins in between would load other samples."""
    recipe, sentence = REFUSED[name]
    with pytest.raises(UsageError, match=sentence):
        play(recipe)


OF_MODULES = {
    "a mask that is set once": (case(head=at(6, set_mask)), "step 6: .*net.mask, a Tensor"),
    "a mask that a tail sets": (case(tail=at(6, set_mask)), "step 7: .*net.mask, a Tensor"),
    "a mask that is set late": (case(tail=at(LATE, set_mask)), f"step {LATE}: .*net.mask, a Tensor"),
    "an array": (case(tail=at(6, lambda r: setattr(r.net, "mask", np.ones(1)))), "net.mask, a ndarray"),
    "a dict of tensors": (
        case(head=at(6, lambda r: setattr(r.net, "mask", {"a": torch.ones(1)}))),
        "net.mask, a dict",
    ),
    "a list that gets tensors": (case(tail=at(6, lambda r: r.net.banks.append(torch.ones(1)))), "net.banks"),
}


@pytest.mark.parametrize("name", OF_MODULES)
def test_a_tensor_that_the_body_sets_in_a_module_is_refused(name):
    """No state_dict has a plain attribute. That no method of the class assigns it shows that no
    forward has left it there.
    """
    recipe, sentence = OF_MODULES[name]
    recipe.net.banks = []
    with pytest.raises(UsageError, match=sentence):
        play(recipe, steps=LATE, kept=[LATE])


HARMLESS = {
    "noise that is set in each step": case(head=lambda r, s: setattr(r.net, "noise", torch.rand(1))),
    "labels that are made in each step": case(head=lambda r, s: set_labels(r)),
    "a strength that is set in each step, by the epoch": case(
        head=lambda r, s: setattr(r.data, "strength", (s - 1) // EPOCH)
    ),
    "a temperature that falls, which a resume puts back": case(
        tail=lambda r, s: set_temperature(r) if s % EPOCH == 0 else None
    ),
    "a strength that is set once, which a resume puts back": case(
        tail=at(6, lambda r: setattr(r.data, "strength", 0.5))
    ),
    "what a forward leaves": case(
        forward=lambda r, s: setattr(r.net, "last", torch.rand(1)),
        tail=lambda r, s: setattr(r.net, "last", torch.rand(1)),
    ),
    "a mask of the first forward": case(forward=at(3, set_mask)),
    "a hook that each step sets and removes": case(
        head=lambda r, s: r.net.layers[0].weight.register_hook(torch.sign).remove()
    ),
    "a hook that was there before the loop": case(),
    "a cache that loading fills": case(
        load=lambda r, s: r.data.cache.update({s: s}), tail=at(6, lambda r: r.data.cache.update(x=1))
    ),
    "a cache that an evaluation fills": case(evaluate=at(6, lambda r: r.data.cache.update(x=1))),
    "what an evaluation leaves": case(evaluate=at(6, set_mask)),
    "evaluation mode": case(tail=lambda r, s: r.net.train(s % 2 == 0)),
    "training": case(forward=lambda r, s: r.net.layers[0](torch.rand(1, 1)).sum().backward()),
}


HARMLESS["a hook that was there before the loop"].net.layers[0].weight.register_hook(torch.sign)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_process_that_begins_here_has_too_is_not_named(name):
    assert play(HARMLESS[name], steps=3 * ALL_OF_FIRST, kept=range(1, 3 * ALL_OF_FIRST, 5)) == {}


def test_what_a_modules_extra_state_has_is_not_named():
    """A list that grows in each third step: the state_dict of the module saves it."""

    def tail(recipe, step):
        if step % 3 == 0:
            recipe.net.count += 1
            recipe.net.losses = [*recipe.net.losses, 0.5]
            recipe.net.words = {"a": step}

    recipe = case(tail=tail)
    recipe.net = Counting()
    recipe.optimizer = torch.optim.SGD(recipe.net.parameters())
    assert play(recipe, kept=range(1, 12)) == {}


class Stored(Samples):
    """What a loop may write into."""

    base_list: ClassVar = [1, 2]
    progress = multiprocessing.Value("d", 0.0)

    def __init__(self):
        super().__init__()
        self.numbers, self.words, self.by_name = np.zeros(4), ["a", "b"], {"a": 1}
        self.rows, self.samples, self.pairs = [[1], [2]], [{"label": 1}, {"label": 2}], [(np.zeros(2), 1)]
        self.settings = SimpleNamespace(alpha=0.1)
        self.shared_labels = torch.zeros(2).share_memory_()
        self.hits, self.seen = np.zeros(4), [0, 0]
        self.epoch, self.strengths = multiprocessing.Value("i", 0), multiprocessing.Array("d", 4)
        self.raw, self.table = multiprocessing.RawValue("d", 1.0), array.array("d", [0.0] * 4)
        self.calls = multiprocessing.Value("i", 0)

    def __getitem__(self, index):
        self.note(index)
        return self.labels[index]

    def __len__(self):
        return 2

    def note(self, index):
        self.hits[index] += 1
        self.calls.value += 1
        self.seen[index] = 1


def write_data(recipe):
    recipe.data.labels.data[1] = 3.0


WRITTEN = {
    "labels": write_data,
    "numbers": lambda r: r.data.numbers.__setitem__(1, 5),
    "words": lambda r: r.data.words.__setitem__(1, "c"),
    "by_name": lambda r: r.data.by_name.update(a=2),
    "rows": lambda r: r.data.rows[1].__setitem__(0, 3),
    "samples": lambda r: r.data.samples[1].update(label=3),
    "pairs": lambda r: r.data.pairs[0][0].fill(1),
    "settings": lambda r: setattr(r.data.settings, "alpha", 0.2),
    "shared_labels": lambda r: r.data.shared_labels.fill_(1),
    "epoch": lambda r: setattr(r.data.epoch, "value", 3),
    "strengths": lambda r: r.data.strengths.__setitem__(1, 0.5),
    "progress": lambda r: setattr(r.data.progress, "value", r.data.progress.value + 1),
    "raw": lambda r: setattr(r.data.raw, "value", 0.5),
    "table": lambda r: r.data.table.__setitem__(1, 0.5),
    "base_list": lambda r: Stored.base_list.__setitem__(0, 7),
}


def stored(**moments):
    recipe = case(**moments)
    recipe.data = Stored()
    Stored.base_list[:] = [1, 2]
    return recipe


@pytest.mark.parametrize("step", [6, LATE])
@pytest.mark.parametrize("moment", ["head", "tail"])
@pytest.mark.parametrize("name", WRITTEN)
def test_elements_of_the_dataset_that_the_loop_writes_in_place_are_refused(name, moment, step):
    """The object stays the same, of the same length, and has no count of changes."""
    recipe = stored(**{moment: at(step, WRITTEN[name])})
    with pytest.raises(UsageError, match=rf"step \d+: the loop has changed dataset\.{name}, a"):
        play(recipe, steps=step + 1, kept=[step])


@pytest.mark.parametrize("moment", ["head", "tail"])
def test_elements_that_each_step_writes_are_refused(moment):
    """They may be made from what they were, as weights that fall."""
    recipe = stored(**{moment: lambda r, s: r.data.numbers.__setitem__(s % 4, s)})
    with pytest.raises(UsageError, match=r"step 2: the loop has changed dataset\.numbers, a ndarray"):
        play(recipe)


def test_elements_in_a_dataset_that_others_wrap_are_refused():
    recipe = stored()
    inner = recipe.data
    recipe.data = ConcatDataset([Subset(inner, [0, 1]), inner])
    recipe.head = lambda step: inner.numbers.__setitem__(0, step) if step == 6 else None
    with pytest.raises(UsageError, match=r"dataset\.datasets\[0\]\.dataset\.numbers"):
        play(recipe)


@pytest.mark.parametrize("step", [1, 6, LATE])
def test_elements_that_loading_writes_are_not_the_loops_doing(step):
    """Seen around the loading of a step that is read; of a later one its code tells."""
    recipe = stored(load=lambda r, s: r.data[s % 2] if s >= step else None)
    assert play(recipe, steps=LATE + 60, kept=range(1, LATE + 60, 7)) == {}


def test_a_shared_number_is_refused_with_what_is_saved_instead():
    """A value of multiprocessing reaches the processes that load samples, and no state."""
    recipe = stored(tail=at(6, WRITTEN["epoch"]))
    with pytest.raises(UsageError, match="which no object of the State saves") as error:
        play(recipe)
    assert "dataset.epoch, a Synchronized of multiprocessing" in str(error.value)
    assert "a plain number of the dataset is saved" in str(error.value)


@pytest.mark.parametrize("moment", ["head", "tail"])
def test_what_loading_processes_count_while_the_body_runs_is_not_the_loops_doing(moment):
    """They load ahead, at any time, and count in memory that they share."""

    def count(recipe, _step):
        recipe.data.calls.value += 1

    assert play(stored(**{moment: count}), kept=range(1, 12)) == {}


def test_what_the_state_saves_may_be_written_where_the_dataset_reads_it():
    recipe = stored()
    values = elastic.Values(weights=torch.zeros(3))
    recipe.data.weights = values.weights
    recipe.tail = values.weights.fill_
    assert play(recipe, kept=range(1, 12), values=values) == {}


def test_few_elements_of_a_large_array_are_read_and_a_small_one_wholly():
    contents, small, large = DatasetContents(), np.zeros(1 << 18), np.zeros(1 << 22)
    held = {"dataset.small": Attribute(small, 0), "dataset.large": Attribute(large, 0)}
    contents.read(held)
    small[12345] = 1
    large[0] = 1
    assert contents.read(held) == ["dataset.large", "dataset.small"]
    large[1 << 20] = 1  # between two stretches
    assert contents.read(held) == []


@pytest.mark.parametrize("kind", ["tensor", "array", "file"])
@pytest.mark.parametrize("words", [2048, 1 << 15, 1 << 18])
def test_many_tensors_in_a_list_are_read_once_and_in_bounds(monkeypatch, tmp_path, words, kind):
    """64 stretches of each, each as long as the whole, took seconds in every step. What is read is
    counted: all of the first 32 MiB, and of the others less, the more there are.
    """
    one = np.zeros(words)
    if kind == "file":
        one = np.memmap(tmp_path / "words", dtype=np.float64, mode="w+", shape=words)
    taken, given = [], torch.from_numpy(one) if kind == "tensor" else one
    for name in ("tensor_sums", "array_sums"):
        take = getattr(dataset_contents, name)
        monkeypatch.setattr(
            dataset_contents, name, lambda thing, take=take: [taken.append(thing.nbytes), take(thing)][1]
        )
    contents, held = DatasetContents(), {"dataset.items": Attribute([given] * 4000, 0)}
    contents.read(held)
    assert sum(taken) <= (96 << 20) + 4000 * min(8 * words, 64 << 10)
    assert len(taken) <= 4000 * (1 if words == 2048 else 4) + 64 * 64
    one[-1] = 1
    assert contents.read(held) == ["dataset.items"]


def test_a_cache_that_grows_changes_no_tensor_that_is_read_after_it():
    """Once it holds 32 MiB, stretches of the tensor are read, whose sums are others."""
    cache, labels = {}, np.zeros(1 << 19)
    contents = DatasetContents()
    held = {"dataset.cache": Attribute(cache, 0), "dataset.labels": Attribute(labels, 0)}
    contents.read(held)
    cache.update(enumerate([np.ones(1 << 17)] * 40))
    assert contents.read(held) == ["dataset.cache"]
    labels[0] = 1
    assert contents.read(held) == ["dataset.labels"]


class Named:
    def __init__(self, image, label):
        self.image, self.label = image, label


@pytest.mark.parametrize("place", [0, 5, 2999])
@pytest.mark.parametrize("kind", ["list", "dict", "record"])
def test_labels_beside_tensors_are_read_in_each_row_of_long_lists(kind, place):
    """What is inside tensors is read of a part, and of later lists of hardly any."""
    make = {
        "list": lambda label: [torch.zeros(2), label],
        "dict": lambda label: {"image": torch.zeros(2), "label": label},
        "record": lambda label: Named(torch.zeros(2), label),
    }[kind]
    given = {f"dataset.{name}": Attribute([make(n) for n in range(3000)], 0) for name in ("one", "other")}
    contents = DatasetContents()
    assert not contents.read(given) and not contents.read(given)
    for name, each in given.items():
        row = each.value[place]
        row = vars(row) if kind == "record" else row
        row["label" if kind != "list" else 1] = -1
        assert contents.read(given) == [name]
        row["image" if kind != "list" else 0] = torch.zeros(2)
        assert contents.read(given) == [name]


def test_a_cache_that_grows_does_not_choose_other_elements_of_what_is_read_after_it():
    """It was refused as the loop's doing, which had changed nothing."""
    cache, contents = {}, DatasetContents()
    rows = [[torch.zeros(2), n] for n in range(3000)]
    given = {"dataset.cache": Attribute(cache, 0), "dataset.rows": Attribute(rows, 0)}
    contents.read(given)
    cache.update({n: torch.zeros(2) for n in range(100)})
    assert contents.read(given) == ["dataset.cache"]
