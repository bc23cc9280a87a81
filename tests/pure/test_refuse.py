"""What cannot be exact is refused before the first step, with what to write instead."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from elastic.errors import UsageError
from elastic.train import refuse
from elastic.train.state.state import State

CPU = torch.device("cpu")


@pytest.fixture
def generator(monkeypatch):
    """Stands for torch's default generator; seeded from entropy, as in a new interpreter."""
    found = torch.Generator()
    found.seed()
    monkeypatch.setattr(torch, "default_generator", found)
    return found


def with_hook():
    layer = nn.Linear(2, 2)
    layer.weight.register_post_accumulate_grad_hook(lambda _parameter: None)
    return layer


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (lambda: nn.SyncBatchNorm(2), r"found a SyncBatchNorm at model\.layer"),
        (lambda: nn.Embedding(3, 2, sparse=True), r"found model\.layer with sparse=True"),
        (with_hook, r"hook at model\.layer\.weight"),
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


@pytest.mark.parametrize(
    "kind", [nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel]
)
def test_wrappers_that_exchange_gradients_are_refused(monkeypatch, kind):
    """With two workers their exchange would wait for ever, because ranks have different shards."""
    for each in (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel):
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


def test_draws_of_an_unseeded_generator_are_refused(generator):
    """A model that is built before elastic.start has other weights in each process."""
    refuse.early_draws()
    torch.rand(1, generator=generator.manual_seed(5))
    refuse.early_draws()
    generator.seed()
    torch.rand(1, generator=generator)
    with pytest.raises(UsageError, match=r"torch\.manual_seed"):
        refuse.early_draws()
