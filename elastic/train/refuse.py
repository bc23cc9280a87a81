"""What cannot be exact is refused before the first step, with what to write instead.

Each check raises UsageError, which says what was expected, what was found and what to do. What only
shows in a step is checked there (contract.py).
"""

import inspect
import signal
import sys
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from elastic.data.own_files import is_own_code
from elastic.errors import UsageError
from elastic.reduce.gradient_hooks import not_ours
from elastic.system import forked_child, stop_signals
from elastic.system.global_random import RECIPE_SEEDS, was_drawn_from
from elastic.train.state.state import State

_EMBEDDINGS = nn.Embedding, nn.EmbeddingBag
_EXCHANGES = (
    "exchanges gradients itself, and waits for ever where ranks compute different numbers of shards; use the model "
    "as it is: this library sums the gradients of all shards"
)

_started: list[bool] = []
_allowed: dict[signal.Signals, Any] = {}  # handlers that were looked at


def second_start() -> None:
    if _started:
        raise UsageError(
            "expected one call of elastic.start, found a second one; a script holds one run: call it once and hand on what it returns"
        )
    _started.append(True)


def early_draws() -> None:
    """Before elastic.start each process and each start would draw other numbers."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators += torch.cuda.default_generators
    for generator in generators:
        if generator.initial_seed() >= RECIPE_SEEDS and was_drawn_from(torch, generator):
            raise UsageError(
                "random numbers were drawn from torch's generator before elastic.start, and it was not seeded: each process would draw others; "
                f"build the model and split the data after elastic.start, or call torch.manual_seed (with a number below {RECIPE_SEEDS}) first"
            )


def use_in_forked_child() -> None:
    if forked_child.is_one():
        raise UsageError(
            "a process that the recipe forked went on with the run: expected that a child ends where it was forked, with os._exit, "
            "or with the function that multiprocessing runs; the loop, sums and evaluations are those of the process that called elastic.start"
        )


def own_signal_handlers() -> None:
    """Of the signals that ask for the end of a run. A library may have one for itself."""
    for number in stop_signals.END:
        handler = signal.getsignal(number)
        if handler is not _allowed.get(number) and _is_of_recipe(handler):
            raise UsageError(
                f"the recipe handles {number.name} itself ({_described_handler(handler)}): a loop that it leaves then would count as ended by the recipe, and the same command would train"
                " nothing more. Leave the handler out: told to stop, all ranks finish the same step, its state is saved, and the same command"
                " goes on from there (exit code 75)"
            )
        _allowed[number] = handler


def kept_signal_handlers() -> list[str]:
    """Sentences about signals that the recipe handles and that may ask for a drain as well.

    Nothing is refused: under other launchers such a handler is how a script hears of its end.
    """
    found = []
    for number in stop_signals.WARNINGS:
        handler = signal.getsignal(number)
        if _is_of_recipe(handler):
            found.append(
                f"the recipe handles {number.name} itself ({_described_handler(handler)}), and keeps doing so. The command may take the same signal as a request"
                " to leave (--drain-signals): then all ranks finish the same step, and its state is saved. A loop that the recipe leaves because of it"
                " counts as ended by the recipe, and the same command trains nothing more: do not leave the loop for a signal"
            )
    return found


def _is_of_recipe(handler: Any) -> bool:
    if not callable(handler) or isinstance(handler, signal.Handlers) or handler is signal.default_int_handler:
        return False
    called = _called(handler)
    return inspect.isbuiltin(called) or is_own_code(called)


def _described_handler(handler: Any) -> str:
    called = _called(handler)
    return f"{called.__module__}.{getattr(called, '__qualname__', type(called).__qualname__)}"


def _called(handler: Any) -> Any:
    """What it runs, behind partials and decorators."""
    called = inspect.unwrap(handler)
    return _called(called.func) if isinstance(called, partial) else called


def own_group() -> None:
    if dist.is_available() and dist.is_initialized():
        raise UsageError(
            "expected no process group before elastic.start, found one that the recipe has opened; leave init_process_group out: "
            "elastic.start opens the groups that it needs"
        )


def threads(pinned: int) -> None:
    """CPU kernels split their sums by threads. pinned: what elastic.start has set."""
    found = torch.get_num_threads()
    if found != pinned:
        raise UsageError(
            f"expected {pinned} threads a worker, as elastic.start has set, found {found}: the result depends on them; "
            f"leave torch.set_num_threads out, and set OMP_NUM_THREADS={found} for the command"
        )


def wrappers() -> None:
    """From here on the constructors of wrappers that exchange gradients refuse."""
    classes: list[Any] = [nn.parallel.DistributedDataParallel, nn.DataParallel]
    if fsdp := sys.modules.get("torch.distributed.fsdp"):  # its import would take a while
        classes.append(fsdp.FullyShardedDataParallel)
    for each in classes:
        each.__init__ = _refusing(each.__name__)


def _refusing(name: str) -> Any:
    def __init__(self: object, *_: object, **__: object) -> NoReturn:  # noqa: N807
        raise UsageError(f"expected a model without {name}, which {_EXCHANGES}")

    return __init__


def modules(state: State, device: torch.device) -> None:
    """Before the first step. device: the run's."""
    for name, thing in state.objects.items():
        if isinstance(thing, nn.Module):
            for path, module in thing.named_modules(prefix=name):
                _module(path, module)
    for parameter in state.trained:
        where = parameter.device
        if where.type != device.type or where.index not in (None, device.index):
            raise UsageError(
                f"expected trained parameters on {device}, found {state.name_of(parameter)} on {where}; "
                "move the model with .to(run.device) before its optimizer is made"
            )
        if type(parameter).__name__ == "DTensor":
            raise UsageError(
                f"expected whole parameters, found {state.name_of(parameter)} as a DTensor (fully_shard), which {_EXCHANGES}"
            )
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(not_ours(state.name_of(parameter)))


def _module(path: str, module: nn.Module) -> None:
    kinds = {kind.__name__ for kind in type(module).__mro__}
    for name in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"):
        if name in kinds:
            raise UsageError(f"expected a model without {name}, found one at {path}, which {_EXCHANGES}")
    if isinstance(module, nn.SyncBatchNorm):
        raise UsageError(
            f"expected layers that compute alike at every number of workers, found a SyncBatchNorm at {path}; "
            "use BatchNorm: it normalises within a shard, and its running averages are the mean over shards"
        )
    if isinstance(module, _EMBEDDINGS) and module.sparse:
        raise UsageError(f"expected dense gradients, found {path} with sparse=True; leave that out")
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if is_lazy(tensor):
            raise UsageError(
                f"expected initialised parameters, found {path}.{name} of a lazy layer; call the model once on a sample "
                "before its optimizer is made"
            )
