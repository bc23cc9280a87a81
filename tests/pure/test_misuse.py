"""A call that a signature does not allow is refused with what to write; other errors pass."""

import traceback
from types import SimpleNamespace

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, steps

import elastic
from elastic.errors import UsageError
from elastic.train.loop.ends import LoopEnd
from elastic.train.loop.on_step import StepFunctions
from elastic.train.misuse import public
from elastic.train.run import Run
from elastic.train.step.step import Step


@public("run.data")
def data(dataset, *, epochs=None, tail="drop", collate=None):
    """A data set in the run's order."""
    if epochs == "wrong":
        raise TypeError("of the function's own")
    if epochs == "inside":
        data(no_dataset=1)
    return dataset, epochs, tail, collate


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: data([], collate_fn=len), "unexpected keyword argument 'collate_fn'"),
        (lambda: data(epochs=3), "missing 1 required positional argument: 'dataset'"),
        (lambda: elastic.State({}), "expected elastic.State(**objects)"),
    ],
)
def test_a_call_that_does_not_fit_says_what_to_write(call, found):
    with pytest.raises(UsageError) as refused:
        call()
    assert str(refused.value).startswith("expected ")
    assert found in str(refused.value)
    assert refused.value.__context__ is None


def test_a_type_error_from_inside_is_not_taken_for_a_misuse():
    """A recipe's function may raise one; its traceback must stay as it is."""
    with pytest.raises(TypeError, match="of the function's own") as raised:
        data([], epochs="wrong")
    assert [frame.name for frame in traceback.extract_tb(raised.tb)][-1] == "data"
    with pytest.raises(UsageError, match="unexpected keyword argument 'no_dataset'"):
        data([], epochs="inside")


def test_a_computation_left_half_done_is_not_continued():
    """One worker's shard has a bad sample. It would try again, while the others go on."""
    model = torch.nn.Linear(FEATURES, CLASSES)
    step = next(steps(ALONE, elastic.State(model=model)))

    def raises(_batch):
        raise FloatingPointError("a bad sample")

    with pytest.raises(FloatingPointError):
        step.mean_loss(raises)
    with pytest.raises(
        UsageError, match=r"mean_loss was left half done .*\(FloatingPointError: a bad sample\)"
    ):
        step.mean_loss(lambda batch: model(batch.data[0]).mean())
    assert "was left half done" in str(step.error)


class _Left:
    """A loop that is over, without anything to settle."""

    step, parts = None, SimpleNamespace(groups=None)


@pytest.mark.parametrize("place", ["before the loop", "after the loop"])
def test_a_caught_error_of_a_collective_call_comes_again(place, monkeypatch):
    """Else this rank's next call would meet the others' last one, and take their numbers for its
    own. An error that all ranks meet alike, of the arguments of run.data, may be caught.
    """
    monkeypatch.setattr("elastic.train.refuse.use_in_forked_child", lambda: None)
    run = object.__new__(Run)
    run._error, run._state = None, None
    run._worker = SimpleNamespace(identity=None, step_functions=StepFunctions())
    run._loop_end = None if place == "before the loop" else LoopEnd(_Left(), lambda: None)
    with pytest.raises(UsageError):
        run.data([1, 2], epochs=1, workers="two")
    with pytest.raises(UsageError, match=r"run\.evaluate: expected") as first:
        run.evaluate(iter([1, 2]), len)
    with pytest.raises(UsageError, match=r"run\.evaluate: expected") as again:
        run.evaluate([1, 2], len)
    assert str(again.value) == str(first.value)


@pytest.mark.parametrize("kind", [Run, Step, elastic.State])
def test_an_attribute_that_a_recipe_adds_is_refused(kind):
    """It looks as if it were kept, and a process that restarts would lack it. A subclass of the
    recipe's own assigns what it likes.
    """
    with pytest.raises(AttributeError, match="best"):
        kind.__new__(kind).best = 1.0
    own = type("Named", (elastic.State,), {})(model=torch.nn.Linear(1, 1))
    own.name = "a"
