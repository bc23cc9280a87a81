"""Settings of the whole process that change what its arithmetic gives, and the environment.

What the script sets before its loop, every process of the run sets alike. What the loop sets and
leaves so, a process that restarts does not have. It does not see what only a library knows.
"""

import decimal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as hooks_of_modules
from torch.optim import optimizer as hooks_of_optimizers

from elastic.config import environment

Settings = Mapping[str, Any]

_FLAGS = (
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cudnn.allow_tf32", "fp32_precision"),
    *("cuda.matmul.allow_fp16_reduced_precision_reduction", "cuda.matmul.fp32_precision"),
    *("cuda.matmul.allow_bf16_reduced_precision_reduction", "cuda.matmul.allow_fp16_accumulation"),
    *("mkldnn.enabled", "mkldnn.deterministic", "mkldnn.matmul.fp32_precision", "nnpack.enabled"),
    *("mkldnn.conv.fp32_precision", "opt_einsum.enabled", "opt_einsum.strategy", "quantized.engine"),
)
_GETTERS = (
    *("get_default_dtype", "get_default_device", "get_float32_matmul_precision", "get_num_threads"),
    *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
    *("is_grad_enabled", "is_inference_mode_enabled"),
    *("backends.cuda.flash_sdp_enabled", "backends.cuda.mem_efficient_sdp_enabled"),
    *("backends.cuda.math_sdp_enabled", "backends.cuda.cudnn_sdp_enabled"),
    "backends.mha.get_fastpath_enabled",
)
_DEVICES = "cpu", "cuda"
_MODES = {"TorchFunctionMode": "_len_torch_function_stack", "TorchDispatchMode": "_len_torch_dispatch_stack"}
_HOOKS = (
    *((hooks_of_modules, "_global_forward_hooks"), (hooks_of_modules, "_global_forward_pre_hooks")),
    *((hooks_of_modules, "_global_backward_hooks"), (hooks_of_modules, "_global_backward_pre_hooks")),
    *((hooks_of_optimizers, "_global_optimizer_pre_hooks"),),
    *((hooks_of_optimizers, "_global_optimizer_post_hooks"),),
)
_ENVIRONMENT = "os.environ"
_FOLDER = "the working directory"
_SMALLEST = sys.float_info.min  # a normal number, whose half is none
# The first one torch sets when a GPU is first used. The other one is fixed for all processes of a
# run; a set_seed() of the recipe's may still set it.
_WITHOUT_EFFECT = b"CUDA_MODULE_LOADING", b"PYTHONHASHSEED"
_MANY = 2  # in a sentence
_SHOWN = 40  # characters of a value


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenHooks:
    """The innermost pair that is open: in this thread, for what autograd saves in a forward."""

    pack: Any
    unpack: Any

    def __str__(self) -> str:
        names = (getattr(each, "__name__", type(each).__name__) for each in (self.pack, self.unpack))
        return f"open with {' and '.join(names)}"


def _saved_tensors_hooks() -> _OpenHooks | None:
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001 - no public name
    return None if found is None else _OpenHooks(pack=found[0], unpack=found[1])


def _reader(path: str) -> Callable[[], Any] | None:
    """Of a flag below torch.backends. This build of torch may not have it."""
    owner, _, name = path.rpartition(".")
    try:
        held = attrgetter(owner)(torch.backends) if owner else torch.backends
        getattr(held, name)
    except (AttributeError, RuntimeError):
        return None
    return lambda: getattr(held, name)


_READERS: dict[str, Callable[[], Any]] = {
    **{f"torch.{name}()": attrgetter(name)(torch) for name in _GETTERS},
    **{f"torch.backends.{path}": read for path in _FLAGS if (read := _reader(path)) is not None},
    **{
        f"torch.{name}({device!r})": partial(getattr(torch, name), device)
        for device in _DEVICES
        for name in ("is_autocast_enabled", "get_autocast_dtype")
    },
    **{
        f"the number of open {mode}s": attrgetter(name)(torch._C)  # noqa: SLF001 - no public name
        for mode, name in _MODES.items()
        if hasattr(torch._C, name)  # noqa: SLF001
    },
    **(
        {"torch.autograd.graph.saved_tensors_hooks": _saved_tensors_hooks}
        if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")  # noqa: SLF001
        else {}
    ),
    # It has no getter. The processor's mode holds for each arithmetic of the thread, also Python's.
    "torch.set_flush_denormal(...)": lambda: _SMALLEST / 2 == 0,
    "np.geterr()": np.geterr,
    "decimal.getcontext().prec": lambda: decimal.getcontext().prec,
    "decimal.getcontext().rounding": lambda: decimal.getcontext().rounding,
}


def read_settings() -> Settings:
    """By the names that a recipe would use; numbers of hooks and the environment beside them."""
    found = {name: _value(read) for name, read in _READERS.items()}
    for holder, name in _HOOKS:
        found[f"{holder.__name__}.{name}"] = len(vars(holder)[name])
    found[_FOLDER] = _folder()
    found[_ENVIRONMENT] = environment.raw_variables()
    return found


def _folder() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # it was removed while the run goes on
        return "a folder that is gone"


def changed(before: Settings, now: Settings) -> tuple[list[str], list[str]]:
    """(What is refused, each with both values; what is only said)."""
    if before == now:
        return [], []
    names = [name for name in now if before[name] != now[name] and name != _ENVIRONMENT]
    arithmetic = [name for name in names if name in _READERS]
    was, is_ = before[_ENVIRONMENT], now[_ENVIRONMENT]
    variables = [
        name for name in sorted({*was, *is_}.difference(_WITHOUT_EFFECT)) if was.get(name) != is_.get(name)
    ]
    return (
        [f"{name} was {before[name]!s:.{_SHOWN}} and is {now[name]!s:.{_SHOWN}}" for name in arithmetic],
        [name for name in names if name not in arithmetic]
        + [f"{name.decode(errors='replace')} of {_ENVIRONMENT}" for name in variables],
    )


def refusal(found: list[str], since: str, until: str) -> str:
    """found: what `changed` gave first. since, until: places in the run."""
    more = f" and {len(found) - _MANY} more" if len(found) > _MANY else ""
    return (
        f"between {since} and {until} the loop has changed a setting of the whole process: {', '.join(found[:_MANY])}{more}. It changes what the arithmetic gives, "
        "and a process that restarts begins with the former value, so that the run would end with another result. Set it once before the loop; or, for some "
        "calls alone, put it back in the same step"
    )


def _value(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:  # torch refuses one name of a setting where it was set by another one
        return None
