"""Attacks on copies that are made beside training: a slot never holds two states."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.snapshot import image
from elastic.snapshot.transfer import PROBATION, HostTransfer

TENSORS = {"early": 3, "late": 1000, "other": 17}


class Training:
    """A state in host memory, and the slot that it is copied into; `late` and `other` are what only an update changes."""

    def __init__(self):
        self.state = {name: torch.randn(size) for name, size in TENSORS.items()}
        self.transfer = HostTransfer()
        self.body = memoryview(bytearray())

    @property
    def late(self):
        return {self.state[name].data_ptr() for name in ("late", "other")}

    def begin(self, *, now=False):
        layout = image.layout(self.state, {})
        self.body = memoryview(bytearray(layout.size_bytes))
        before = {name: tensor.clone() for name, tensor in self.state.items()}
        self.transfer.start(layout, self.body, self.late, now=now)
        return before

    def complete(self):
        return self.transfer.complete()

    def end_step(self):
        self.transfer.before_update()
        for tensor in self.state.values():
            tensor.add_(1)

    def steps(self, count):
        for _ in range(count):
            self.begin()
            assert self.complete()
            self.end_step()

    def slot(self):
        return image.read(self.body)[0]


@pytest.fixture
def training():
    return Training()


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in TENSORS)


@given(st.lists(st.booleans(), max_size=8), st.booleans())
def test_a_slot_holds_the_state_of_its_step_whatever_the_forward_does(is_now, forward_first):
    training = Training()
    for now in is_now:
        before = training.begin(now=now)
        if forward_first:
            training.state["early"].mul_(2)
        assert training.complete()
        training.state["early"].mul_(2)
        training.end_step()
        assert same(training.slot(), before)


def test_the_copy_goes_on_beside_the_step_once_the_recipe_is_known(training):
    training.steps(PROBATION)
    before = training.begin()
    assert not same(training.slot(), before)
    assert training.complete()
    assert same(training.slot(), before)


def test_a_parameter_that_changes_under_the_copy_is_noticed_and_later_copies_are_made_at_once(training):
    training.steps(PROBATION)
    training.begin()
    training.state["other"].clamp_(-0.1, 0.1)
    assert not training.complete()
    training.end_step()
    before = training.begin()
    training.state["other"].clamp_(-0.1, 0.1)
    assert training.complete()
    assert same(training.slot(), before)


@pytest.mark.parametrize(
    "change", [lambda t: t.data.mul_(2), lambda t: t.numpy().fill(7)], ids=["data", "numpy"]
)
def test_a_recipe_that_writes_past_autograd_before_its_sum_is_found_out_on_probation(training, change):
    for _ in range(PROBATION + 3):
        before = training.begin()
        change(training.state["late"])
        assert training.complete()
        assert same(training.slot(), before)
        training.end_step()


def test_an_update_waits_for_the_copy(training):
    training.steps(PROBATION)
    before = training.begin()
    with ThreadPoolExecutor(1) as beside:
        update = beside.submit(training.end_step)
        assert not update.done()
        assert training.complete()
        update.result()
    assert same(training.slot(), before)
