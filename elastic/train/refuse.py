"""What cannot be exact is refused before the first step, with what to write instead.

Each check raises UsageError, which says what was expected, what was found and what to do. What only
shows in a step is checked there (contract.py).
"""

import sys
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic.errors import UsageError
from elastic.snapshot.sharded import is_sharded
from elastic.system import forked_child
from elastic.train.sharded import optimizers
from elastic.train.state.state import State

_EXCHANGES = (
    "which exchanges gradients itself; use the model as it is: this library sums the gradients of all shards"
)
# torch's CPU generator uses 32 bits of a seed. No recipe chose a larger seed; entropy gives one.
RECIPE_SEEDS = 2**32

_started: list[bool] = []


def second_start() -> None:
    if _started:
        raise UsageError(
            "expected one call of elastic.start, found a second one; call it once and hand on what it returns"
        )
    _started.append(True)


def early_draws() -> None:
    """Before elastic.start each process and each start would draw other numbers."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators += torch.cuda.default_generators
    for generator in generators:
        fresh = torch.Generator(device=generator.device).manual_seed(seed := generator.initial_seed())
        if seed >= RECIPE_SEEDS and not torch.equal(fresh.get_state(), generator.get_state()):
            raise UsageError(
                "expected no draw from torch's unseeded generator before elastic.start, found one; build the "
                f"model and split the data after elastic.start, or call torch.manual_seed (below {RECIPE_SEEDS}) first"
            )


def use_in_forked_child() -> None:
    if forked_child.is_one():
        raise UsageError(
            "expected the loop, sums and evaluations in the process that called elastic.start, found them in a child that the recipe forked; end it "
            "where it was forked, with os._exit"
        )


def own_group() -> None:
    if dist.is_available() and dist.is_initialized():
        raise UsageError(
            "expected no process group before elastic.start, found one; leave init_process_group out: elastic.start opens what it needs"
        )


def threads(pinned: int) -> None:
    """CPU kernels split their sums by threads. pinned: what elastic.start has set."""
    found = torch.get_num_threads()
    if found != pinned:
        raise UsageError(
            f"expected {pinned} threads a worker, as elastic.start has set, found {found}: the result depends on them; leave "
            f"torch.set_num_threads out, and set OMP_NUM_THREADS={found} for the command"
        )


def wrappers() -> None:
    """From here on the constructors of wrappers that exchange gradients refuse."""

    def refusing(self: object, *_: object, **__: object) -> NoReturn:
        raise UsageError(f"expected a model without {type(self).__name__}, {_EXCHANGES}")

    classes: list[Any] = [nn.parallel.DistributedDataParallel, nn.DataParallel]
    if fsdp := sys.modules.get("torch.distributed.fsdp"):  # its import would take a while
        classes.append(fsdp.FullyShardedDataParallel)
    for each in classes:
        each.__init__ = refusing


def modules(state: State, device: torch.device) -> None:
    """Before the first step. device: the run's."""
    sharded = {} if state.sharded is None else state.sharded.ids
    for name, thing in state.objects.items():
        if isinstance(thing, nn.Module):
            for path, module in thing.named_modules(prefix=name):
                if isinstance(module, nn.SyncBatchNorm):
                    raise UsageError(
                        f"expected layers that compute alike at every number of workers, found a SyncBatchNorm at {path}; "
                        "use BatchNorm: it normalises within a shard, and its running averages are the mean over shards"
                    )
            for path, tensor in thing.state_dict(prefix=f"{name}.").items():
                is_dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided
                if is_dense and tensor.untyped_storage().nbytes() < tensor.nbytes:
                    raise UsageError(
                        f"expected tensors that load_state_dict can write to, found {path} expanded; register its .clone(), or register it with persistent=False"
                    )
    for optimizer in state.optimizers if sharded else ():
        optimizers.check(optimizer)
    for parameter in state.trained:
        where = parameter.device
        if where.type != device.type or where.index not in (None, device.index):
            raise UsageError(
                f"expected trained parameters on {device}, found {state.name_of(parameter)} on {where}; "
                "move the model with .to(run.device) before its optimizer is made"
            )
        if is_sharded(parameter) and id(parameter) not in sharded:
            raise UsageError(
                f"expected whole parameters, found {state.name_of(parameter)} as a DTensor; shard its module by run.fully_shard, and load without assign=True"
            )
        if parameter._post_accumulate_grad_hooks or (is_sharded(parameter) and parameter._backward_hooks):  # noqa: SLF001
            raise UsageError(
                f"expected gradients that stay as they are until the step's sum, found a hook of {state.name_of(parameter)}; change .grad in the loop's body, "
                "after step.mean_loss or step.backward"
            )
