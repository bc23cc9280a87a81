"""What DTensor computes of a sharded tensor has the same bits at every world size, or is refused.

DTensor adds up partial sums of ranks in an order that depends on their number: a norm, a mean over
rows, torch's clip_grad_norm_. These are refused. A minimum or a maximum, counts, and whole tensors
by `full_tensor()` have the same bits everywhere. DTensor draws random numbers for the rows of each
rank by themselves; here they are those of the whole tensor.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from elastic.errors import UsageError
from elastic.snapshot.sharded import as_sharded, is_sharded, local

# Operations that depend on no value of their tensor.
_DRAWS = {"normal_", "uniform_", "bernoulli_", "rand_like", "randn_like", "randint_like"}
_SETTINGS = (
    *("set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"),
    *("set_force_sum_reduction_for_comms", "set_gradient_divide_factor", "set_is_last_backward"),
    *("set_reduce_scatter_divide_factor", "set_requires_all_reduce", "set_requires_gradient_sync"),
)


@cache
def make_alike(meet: Callable[[str], None]) -> None:
    """Change DTensor in this process. meet: called before all ranks gather a whole tensor.

    Raises AttributeError where this torch has another DTensor.
    """
    from torch.distributed.tensor import DTensor, Partial

    def redistribute(self: Any, *arguments: Any, **options: Any) -> DTensor:
        meet("a full_tensor() or a full state dict")
        return gathered(self, *arguments, **options)

    gathered, DTensor.redistribute = DTensor.redistribute, redistribute  # type: ignore[method-assign]
    for name in ("_reduce_value", "_reduce_shard_value"):
        setattr(Partial, name, _without_sums(getattr(Partial, name)))
    clip: Any = clip_grad
    clip._get_total_norm = nn.utils.get_total_norm = _total_norm(clip._get_total_norm)  # noqa: SLF001
    dispatcher: Any = DTensor._op_dispatcher  # noqa: SLF001
    for operation in dispatcher._random_ops:  # noqa: SLF001
        dispatcher._custom_op_handlers[operation] = _drawn  # noqa: SLF001


def _without_sums(reduced: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def checked(self: Any, tensor: Tensor, *arguments: Any) -> Tensor:
        if self.reduce_op in ("sum", "avg") and (tensor.is_floating_point() or tensor.is_complex()):
            _refuse_sum()
        return reduced(self, tensor, *arguments)

    return checked


def _refuse_sum() -> NoReturn:
    raise UsageError(
        "expected no sum over rows of a sharded tensor, whose bits depend on the number of workers, found one; take x.full_tensor(), or "
        "elastic.clip_grad_norm_ for torch.nn.utils.clip_grad_norm_"
    )


def _total_norm(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What torch's clip_grad_norm_ calls; with one worker no sum is over ranks."""

    def checked(tensors: Any, *arguments: Any, **named: Any) -> Tensor:
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if any(map(is_sharded, listed)):
            _refuse_sum()
        return norm(listed, *arguments, **named)

    return checked


def _drawn(operation: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Each rank draws all rows, one tensor at a time: its generators are those of all ranks."""
    like = arguments[0] if arguments else None
    name = operation._schema.name.removeprefix("aten::")  # noqa: SLF001 - as torch's own dispatcher reads it
    if name not in _DRAWS or not is_sharded(like):
        raise UsageError(
            "expected no random numbers that depend on the values of a sharded tensor, found dropout or a like; use it in a module's forward"
        )
    drawn = operation(torch.empty(like.shape, dtype=like.dtype, device=like.device), *arguments[1:], **named)
    own = as_sharded(drawn, like)
    if not name.endswith("_"):
        return own.clone()
    local(like).copy_(local(own))
    return like


def refuse_settings(module: Any) -> None:
    """Have a sharded module refuse FSDP2's settings of sums, which are the run's."""

    def refusing(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "expected a sharded module whose sums are the run's, found a call that sets them (set_gradient_divide_factor, "
            "set_requires_gradient_sync and others); leave it out"
        )

    for name in _SETTINGS:
        vars(module)[name] = refusing
