"""What a recipe's function returns for a shard can be summed, and has one form on every shard.

Libraries that exchange tensors end the process where two ranks send different sizes. So before the
first sum of its kind in a generation all ranks tell each other the shapes and types of their
shards' outputs. In later steps each rank compares its own with what was agreed, without a message.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elastic.errors import UsageError
from elastic.reduce.exchange import Exchange

MAX_DIMENSIONS = 8
INTEGERS = torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128
DTYPES = INTEGERS + FLOATS


def check_loss(loss: Any) -> Tensor:
    """Raises UsageError unless it is one number that depends on a parameter."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            f"step.mean_loss: expected the function to return the mean loss of a shard, a scalar tensor, found {described(loss)}"
            f"{'; call .mean() on it' if isinstance(loss, Tensor) else ''}"
        )
    if not loss.requires_grad:
        raise UsageError(
            "step.mean_loss: expected a loss that depends on a parameter that requires a gradient, found one without a graph (all layers are "
            "frozen, or it was computed under no_grad, or from .item() or .detach()); where a batch has nothing to learn from, return (outputs * 0).sum()"
        )
    return loss


def check_summand(output: Any) -> Tensor:
    """Raises UsageError unless outputs like this one can be added."""
    if not isinstance(output, Tensor):
        raise UsageError(
            f"step.sum: expected the function to return a tensor, found {described(output)}; call step.sum once for each tensor, or join them by torch.cat"
        )
    is_dense = output.layout is torch.strided and output.dtype in DTYPES
    if not is_dense or output.dim() > MAX_DIMENSIONS:
        raise UsageError(
            f"step.sum: expected a dense tensor of at most {MAX_DIMENSIONS} dimensions and of one of torch's common types, found {described(output)}"
        )
    return output


def described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    layout = "" if value.layout is torch.strided else f"sparse ({value.layout}) "
    return f"a {layout}tensor of shape {list(value.shape)} and type {value.dtype}"


class OutputForm(NamedTuple):
    """has_graph: of any shard's output, so that the sum has a gradient."""

    shape: torch.Size
    dtype: torch.dtype
    has_graph: bool


class AgreedForms:
    """The form of each sum of a step, once all ranks have agreed on it."""

    def __init__(self, exchange: Exchange, device: torch.device) -> None:
        self._exchange = exchange
        self._device = device
        self._agreed: dict[tuple[int, str], OutputForm] = {}

    def check(self, number: int, function: Callable[..., Any], outputs: dict[int, Tensor]) -> OutputForm:
        """The form of the sum's summands, the same on every rank.

        outputs: of the own shards, in the call `number` of the step, of this function. Raises
        UsageError unless all shards' outputs have the form of all earlier ones; PeerLost when
        another rank is gone.
        """
        # A recipe may call one function in one step and another one in the next.
        key = number, _name_of(function)
        agreed = self._agreed.get(key)
        if agreed is None:
            found = self._agreed[key] = self._check_all(outputs)
            return found
        for shard, output in outputs.items():
            if (output.shape, output.dtype) != agreed[:2]:
                raise UsageError(
                    f"step.sum: expected a tensor of shape {list(agreed.shape)} and type {agreed.dtype}, as in the steps before, found {described(output)} "
                    f"for shard {shard}; {ADVICE}"
                )
            if output.requires_grad and not agreed.has_graph:
                raise UsageError(
                    f"step.sum: expected a tensor without a graph for shard {shard}, as in the steps before, found one that requires a gradient; "
                    "return .detach() in every step, or give the other steps a function of their own"
                )
        return agreed

    def _check_all(self, outputs: dict[int, Tensor]) -> OutputForm:
        """The forms of all shards, each in its own row of one sum: float64 [S, dimensions + 3]."""
        tables = {}
        for shard, output in outputs.items():
            form = [output.requires_grad, DTYPES.index(output.dtype), output.dim(), *output.shape]
            table = torch.zeros(self._exchange.shards, MAX_DIMENSIONS + 3, dtype=torch.float64)
            table[shard, : len(form)] = torch.tensor(form, dtype=torch.float64)
            tables[shard] = table.to(self._device)
        like = torch.empty(
            self._exchange.shards, MAX_DIMENSIONS + 3, dtype=torch.float64, device=self._device
        )
        found = self._exchange.sum_shards(tables, "the forms of a sum", like)
        forms = found[:, 1:].tolist()
        for shard, form in enumerate(forms):
            if form != forms[0]:
                raise UsageError(
                    f"step.sum: expected the same shape and type for every shard, found {_form(forms[0])} for shard 0 and {_form(form)} "
                    f"for shard {shard}; {ADVICE}"
                )
        dtype, dimensions, *sizes = map(int, forms[0])
        has_graph = bool(found[:, 0].any())
        return OutputForm(torch.Size(sizes[:dimensions]), DTYPES[dtype], has_graph)


ADVICE = "sum over the samples inside the function, or pad to one size; functions of two forms need two names"


def _name_of(function: Any) -> str:
    """The same in every step and on every rank, also where a step makes its function anew."""
    function = inspect.unwrap(function)
    if isinstance(function, partial):
        return _name_of(function.func)
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _form(row: list[float]) -> str:
    dtype, dimensions = (int(number) for number in row[:2])
    return f"{[int(size) for size in row[2 : 2 + dimensions]]} {DTYPES[dtype]}"
