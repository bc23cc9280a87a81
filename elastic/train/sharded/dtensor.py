"""Numbers that DTensor makes of a sharded tensor do not depend on the world size, or are refused.

It adds up partial sums of ranks in an order that depends on their number: a norm, a mean over
rows, torch's clip_grad_norm_. For an operation that is not row by row it gathers rows by itself,
where writes are lost (`p[0] = 1`), as is `p.data = x`. These are refused. A minimum or a maximum,
counts, and whole tensors by `full_tensor()` have the same bits everywhere. It draws random numbers
for the rows of each rank by themselves, and its `item()` is of these rows; here they are those of
the whole tensor.

It does not see functions of rows that a CPU rounds by their number or place (`pow`, a product).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from elastic.errors import UsageError
from elastic.snapshot.sharded import as_sharded, is_cut_by_rows, is_sharded, local

# Draws that depend on no value of their tensor.
_DRAWS = {
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_"),
    *("uniform_", "rand_like", "randn_like", "randint_like"),
}
_SETTINGS = (
    *("set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"),
    *("set_force_sum_reduction_for_comms", "set_gradient_divide_factor", "set_is_last_backward"),
    *("set_reduce_scatter_divide_factor", "set_requires_all_reduce", "set_requires_gradient_sync"),
)


def make_alike(meet: Callable[[str], None]) -> None:
    """Change DTensor in this process. meet: called before all ranks gather rows.

    Raises AttributeError where this torch has another DTensor.
    """
    from torch.distributed.tensor import DTensor, _api, _dispatch, _redistribute

    # All that DTensor exchanges passes here; with one worker too, where nothing is sent.
    recipes: list[Any] = [_api, _redistribute]
    operations: Any = _dispatch
    exchange = _redistribute.redistribute_local_tensor

    def exchanged(tensor: Tensor, current: Any, *rest: Any, is_asked: bool = True, **named: Any) -> Tensor:
        of_ranks = {each.reduce_op for each in current.placements if each.is_partial()}
        is_sum = of_ranks - {"min", "max"} and (tensor.is_floating_point() or tensor.is_complex())
        if is_sum or (not is_asked and any(each.is_shard() for each in current.placements)):
            raise UsageError(
                "expected operations row by row on a sharded tensor, found another (a sum, p[0] = 1); take x.full_tensor(), "
                "elastic.clip_grad_norm_ for torch.nn.utils.clip_grad_norm_, and write before run.fully_shard"
            )
        if not all(each.is_replicate() for each in current.placements):
            meet("a gather (x.full_tensor(), a full state dict, a number of all rows)")
        return exchange(tensor, current, *rest, **named)

    for module in recipes:
        module.redistribute_local_tensor = exchanged
    operations.redistribute_local_tensor = partial(exchanged, is_asked=False)
    kind: Any = DTensor
    dispatcher = kind._op_dispatcher  # noqa: SLF001
    aten, handlers = torch.ops.aten, dispatcher._custom_op_handlers  # noqa: SLF001
    for each in (aten._local_scalar_dense, aten.any, aten.all):  # noqa: SLF001
        handlers[each.default] = _of_all_rows
    kind.data = property(kind.data.__get__, _refuse_data)
    known = dispatcher.sharding_propagator
    for operation in (*known.op_strategy_funcs, *known.op_single_dim_strategy_funcs):
        if torch.Tag.nondeterministic_seeded in operation.tags:
            handlers[operation] = _drawn
    for packet in (getattr(aten, name) for name in _DRAWS):  # torch makes some of others, such as cauchy_
        handlers |= {getattr(packet, name): _drawn for name in packet.overloads()}


def _of_all_rows(operation: Any, arguments: tuple[Any, ...], _: dict[str, Any]) -> Any:
    """any(), all(), and `item()`, which torch takes of this rank's rows, or of its own sum."""
    return operation(arguments[0].full_tensor())


def _refuse_data(*_: Any) -> NoReturn:
    raise UsageError(
        "expected p.copy_(x) below torch.no_grad() for a sharded tensor, found p.data = x, which torch takes and forgets"
    )


def _drawn(operation: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Each rank draws all rows, one tensor at a time: its generators are those of all ranks."""
    like: Any = arguments[0] if arguments else None
    is_of_rows = is_sharded(like) and is_cut_by_rows(like) and not any(map(is_sharded, arguments[1:]))
    name = operation._schema.name.removeprefix("aten::")  # noqa: SLF001 - as torch's own dispatcher reads it
    if name not in _DRAWS or not is_of_rows:
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
