"""What cannot be exact is refused before the first step, with what to write instead."""

import traceback
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from saved_state import Holder
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import elastic
from elastic.errors import UsageError
from elastic.train import refuse
from elastic.train.loop.ends import LoopEnd
from elastic.train.loop.loop import Loop
from elastic.train.loop.on_step import StepFunctions
from elastic.train.run import Run
from elastic.train.state.state import State
from elastic.train.step.step import Step

CPU, EXPANDED = torch.device("cpu"), torch.ones(1, 2).expand(3, 2)


def with_hook():
    layer = nn.Linear(2, 2)
    layer.weight.register_post_accumulate_grad_hook(lambda _parameter: None)
    return layer


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (lambda: nn.SyncBatchNorm(2), r"found a SyncBatchNorm at model\.layer"),
        (lambda: nn.Embedding.from_pretrained(EXPANDED), r"found model\.layer\.weight exp"),
        (with_hook, r"hook of model\.layer\.weight"),
        (lambda: nn.Linear(2, 2, device="meta"), r"found model\.layer\.weight on meta"),
    ],
)
def test_a_module_that_cannot_be_exact_is_refused_by_name(module, says):
    """Each stands as a layer of a model whose other layer is an ordinary one."""
    model = nn.Sequential()
    model.add_module("first", nn.Linear(2, 2))
    model.add_module("layer", module())
    with pytest.raises(UsageError, match=says):
        refuse.modules(State(model=model), CPU)


WRAPPERS = nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers_that_exchange_gradients_are_refused(monkeypatch, kind):
    """With two workers their exchange would wait for ever, because ranks have different shards."""
    for each in WRAPPERS:
        monkeypatch.setattr(each, "__init__", each.__init__)  # put back after the test
    refuse.wrappers()
    with pytest.raises(UsageError, match=f"without {kind.__name__}, .*use the model as it is"):
        kind(nn.Linear(2, 2), device_ids=[0])


def test_a_process_group_of_the_recipes_own_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="leave init_process_group out"):
            refuse.own_group()
    finally:
        dist.destroy_process_group()
    refuse.own_group()


def test_other_threads_and_a_second_run_are_refused(monkeypatch):
    """torch.set_num_threads(os.cpu_count()) after elastic.start: another number on each machine."""
    found = torch.get_num_threads()
    refuse.threads(found)
    with pytest.raises(UsageError, match=f"OMP_NUM_THREADS={found} "):
        refuse.threads(found + 1)
    monkeypatch.setattr(refuse, "_started", [])
    refuse.second_start()
    with pytest.raises(UsageError, match=r"one call of elastic\.start, found a second one"):
        refuse.second_start()


# A call that a signature does not allow is refused with what to write; other errors pass.


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: Run.data(None, [], collate_fn=len), "unexpected keyword argument 'collate_fn'"),
        (lambda: Run.data(None, epochs=3), "missing 1 required positional argument: 'dataset'"),
        (lambda: elastic.State({}), "expected elastic.State(**objects)"),
    ],
)
def test_a_call_that_does_not_fit_says_what_to_write(call, found):
    with pytest.raises(UsageError) as refused:
        call()
    assert str(refused.value).startswith("expected ")
    assert found in str(refused.value)
    assert refused.value.__context__ is None


def test_a_computation_left_half_done_is_not_continued():
    """One worker's shard has a bad sample. It would try again, while the others go on. The error is
    not taken for a misuse of the call, and has its own traceback.
    """
    model = torch.nn.Linear(FEATURES, CLASSES)
    step = next(steps(ALONE, elastic.State(model=model)))

    def raises(_batch):
        raise TypeError("a bad sample")

    with pytest.raises(TypeError, match="a bad sample") as raised:
        step.mean_loss(raises)
    assert traceback.extract_tb(raised.tb)[-1].name == "raises"
    with pytest.raises(UsageError, match=r"mean_loss was left half done .*\(TypeError: a bad sample\)"):
        step.mean_loss(lambda batch: model(batch.data[0]).mean())
    assert "was left half done" in str(step.error)


def test_a_state_that_no_save_could_keep_is_refused_at_once():
    """An optimizer may have its state from its first step on, long before a save is due."""
    loop = SimpleNamespace(parts=SimpleNamespace(state=State(kept=Holder({"seen": {1}}))))
    step = SimpleNamespace(error=None, number=5)
    Loop._check_body(loop, step, first=4)
    with pytest.raises(UsageError, match="expected tensors, numbers, strings"):
        Loop._check_body(loop, step, first=5)


@pytest.mark.parametrize("place", ["before the loop", "after the loop"])
def test_a_caught_error_of_a_collective_call_comes_again(place, monkeypatch):
    """Else this rank's next call would meet the others' last one, and take their numbers for its
    own. An error that all ranks meet alike, of the arguments of run.data, may be caught.
    """
    monkeypatch.setattr("elastic.train.refuse.use_in_forked_child", lambda: None)
    run = object.__new__(Run)
    run._error, run._state = None, None
    run._begun = SimpleNamespace(identity=None, step_functions=StepFunctions())
    left = SimpleNamespace(step=None, parts=SimpleNamespace(groups=None))  # a loop that is over
    run._loop_end = None if place == "before the loop" else LoopEnd(left, lambda: None)
    with pytest.raises(UsageError):
        run.data(iter([1, 2]), epochs=1)
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
