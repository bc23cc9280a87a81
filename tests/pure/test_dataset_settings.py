"""Numbers that a loop sets in its dataset are, in a process that begins at any step, those that the
undisturbed process has.

`play` goes through the moments of a step as the loop does: the body's head, the loading of the
batch, the body's tail. A process that begins later builds the dataset again.
"""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.data.record import DataRecord, parse
from elastic.errors import UsageError
from elastic.snapshot.slots import INFO_LIMIT_BYTES, SnapshotInfo
from elastic.train.dataset_settings import MANY, DatasetSettings

STEPS = 6


class Flip:
    def __init__(self):
        self.p = 0.5


class Samples(torch.utils.data.Dataset):
    shared: ClassVar[float] = 0.0

    def __init__(self):
        self.strength, self.word, self.is_on, self.loads, self.open_file = 0.1, "weak", False, 0, None
        self.transforms = [Flip()]


class Outer(torch.utils.data.Dataset):
    def __init__(self):
        self.inner = Samples()
        self.inner.epoch = -1


def seen(dataset):
    inner = dataset.inner
    return [inner.strength, inner.word, inner.is_on, inner.epoch, inner.transforms[0].p, inner.shared]


def play(actions, first=1, saved=None):
    """{step: (what loading sees, what is saved)}. actions: {(step, moment): {name: value}}."""
    Samples.shared = 0.0
    dataset = Outer()
    settings = DatasetSettings(dataset=dataset)
    settings.put_back(saved or {}, "NEW_RUN")

    def act(step, moment):
        for name, value in actions.get((step, moment), {}).items():
            if name == "p":
                dataset.inner.transforms[0].p = value
            elif name == "shared":
                Samples.shared = value
            else:
                setattr(dataset.inner, name, value)

    found = {}
    for step in range(first, STEPS + 1):
        act(step, "head")
        settings.before_loading()
        loaded = seen(dataset)
        dataset.inner.loads += 1
        dataset.inner.open_file = "part-7"
        settings.after_loading()
        act(step, "tail")
        found[step] = loaded, settings.changed()
    return found


plain = st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.sampled_from(["", "ä", "strong"])
names = st.sampled_from(["strength", "word", "is_on", "epoch", "p", "shared"])
moments = st.tuples(st.integers(1, STEPS), st.sampled_from(["head", "tail"]))


@given(
    st.dictionaries(moments, st.dictionaries(names, plain, min_size=1), max_size=5), st.integers(1, STEPS - 1)
)
def test_a_process_that_begins_at_any_step_loads_with_what_the_loop_had_set(actions, step):
    """Any numbers, set in any steps, before or after the samples are loaded."""
    calm = play(actions)
    saved = parse(
        json.dumps({"samples": 1, "epochs": 1, "steps": 9, "tail": "drop", "settings": calm[step][1]})
    )
    resumed = play(actions, first=step + 1, saved=saved.settings)
    for later in range(step + 1, STEPS + 1):
        assert repr(resumed[later][0]) == repr(calm[later][0])
        assert resumed[later][1] == calm[later][1]


def test_what_loading_changes_and_what_the_loop_leaves_alone_is_not_saved():
    """A counter of loads and the name of an open file belong to a process."""
    assert play({})[STEPS][1] == {}
    assert play({(2, "tail"): {"strength": 0.7}})[STEPS][1] == {"dataset.inner.strength": "0.7"}


def test_what_a_class_holds_is_put_back_there():
    """Else a later change of the class would not reach the dataset."""
    actions = {(1, "head"): {"shared": 0.5}, (4, "head"): {"shared": 0.9}}
    calm = play(actions)
    assert calm[2][1] == {"dataset.inner.__class__.shared": "0.5"}
    assert play(actions, first=3, saved=calm[2][1])[5][0] == calm[5][0]


@pytest.mark.parametrize("place", ["dataset.gone.p", "other.p", "dataset.inner.transforms[1].p"])
def test_an_attribute_that_has_no_place_any_more_is_refused(place):
    with pytest.raises(UsageError, match=r"the loop had set .* to 0\.3 when the state was saved"):
        play({}, saved={place: "0.3"})


def test_as_many_as_are_kept_find_room_beside_a_snapshot():
    """The header of a snapshot has one page; the image has the data as well."""
    settings = {f"dataset.transforms[{n}].a_long_name_of_a_number": "0.123456789" for n in range(MANY)}
    record = DataRecord(samples=1, epochs=1, steps=1, tail="drop", settings=settings)
    info = SnapshotInfo(step=3, epoch=0, generation=1, world_size=1, torch="2", data=record.to_json())
    assert len(record.to_json()) > INFO_LIMIT_BYTES
    assert len(info.to_json()) <= INFO_LIMIT_BYTES
    assert SnapshotInfo.parse(info.to_json()).step == info.step


class Derived(Samples):
    pass


@pytest.mark.parametrize("kind", [Samples, Derived])
def test_what_a_base_class_holds_is_put_back_in_that_class(kind):
    """In the class that the loop had set it in: another would hide what the loop sets later."""
    Samples.shared = 0.0
    dataset = Derived()
    settings = DatasetSettings(dataset=dataset)
    kind.shared = 0.5
    saved = settings.changed()
    assert len(saved) == 1
    Samples.shared = 0.0
    if "shared" in vars(Derived):
        del Derived.shared
    DatasetSettings(dataset=dataset).put_back(saved, "NEW_RUN")
    assert ("shared" in vars(Derived), kind.shared) == (kind is Derived, 0.5)
    Samples.shared = 0.9
    assert dataset.shared == (0.5 if kind is Derived else 0.9)
    if kind is Derived:
        del Derived.shared


@pytest.mark.parametrize("number", ["9", "x", "-1"])
def test_a_class_that_is_not_there_is_refused(number):
    with pytest.raises(UsageError, match="has no such attribute"):
        DatasetSettings(dataset=Samples()).put_back({f"dataset.__class__{number}.shared": "0.5"}, "NEW_RUN")


@dataclass(slots=True, frozen=True)
class Gain:
    factor: float = 1.0

    def __call__(self, value):
        return value * self.factor


class Bias:
    __slots__ = ("__term",)

    def __init__(self):
        self.term = 0.0

    def __call__(self, value):
        return value + self.term

    @property
    def term(self):
        return self.__term

    @term.setter
    def term(self, value):
        self.__term = value


class Sealed(torch.utils.data.Dataset):
    def __init__(self):
        self.gain, self.steps = Gain(), [Bias()]

    def of_one(self):
        return self.steps[0](self.gain(1.0))


def test_numbers_in_slots_come_back_as_well():
    """A dataclass with slots, and a class with a private one in a list, have no dict."""
    calm = Sealed()
    settings = DatasetSettings(dataset=calm)
    settings.before_loading()
    settings.after_loading()
    object.__setattr__(calm.gain, "factor", 3.0)
    calm.steps[0].term = 0.5
    saved = settings.changed()
    assert saved == {"dataset.gain.factor": "3.0", "dataset.steps[0]._Bias__term": "0.5"}
    resumed = Sealed()
    DatasetSettings(dataset=resumed).put_back(saved, "NEW_RUN")
    assert resumed.of_one() == calm.of_one() == 3.5


class Counting(torch.utils.data.Dataset):
    """Its samples may depend on how many were loaded before."""

    def __init__(self):
        self.epoch, self.size, self.path, self.is_open, self.gain = 0, None, "", False, 1.0

    def __getitem__(self, index):
        self.size, self.path, self.is_open = 8, f"{index}.png", True
        self.epoch += index == 0
        return index


def test_a_number_that_loading_changes_after_the_first_step_is_found():
    """Sample 0 counts epochs; a constant that the first sample sets, a name and a flag do not."""
    dataset = Counting()
    settings = DatasetSettings(dataset=dataset)
    for index in (0, 3):
        dataset.gain /= 2  # the loop does
        settings.before_loading()
        dataset[index]
        settings.after_loading()
    assert settings.counted == set()
    settings.before_loading()
    dataset[0]
    settings.after_loading()
    assert settings.counted == {"dataset.epoch"}


class Cleaned(torch.utils.data.Dataset):
    clean = 0

    def __init__(self):
        self.clean = 1


def test_a_number_that_the_loop_removes_is_refused():
    """Below it lies the class's own, so that samples are loaded otherwise from there on."""
    dataset = Cleaned()
    settings = DatasetSettings(dataset=dataset)
    del dataset.clean
    with pytest.raises(UsageError, match=r"the loop removed dataset\.clean, and a process that restarts"):
        settings.changed()
