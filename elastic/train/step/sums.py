"""What a function returns for each shard is summed in one form, and differentiated once.

*Forms.* Libraries that exchange tensors end the process where two ranks send different sizes. So
before the first sum of its kind in a generation all ranks tell each other the shapes and types of
their shards' outputs. In later steps each rank compares its own with what was agreed, without a
message.

*Gradients.* A sum is open until a backward, or the end of the step, has used it. Until then the
graphs of all own shards are kept, and the gradient of a loss passes from the result of the sum into
them. A backward that reaches the result from elsewhere would lose the function's part of the
gradient, and is refused.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elastic.errors import UsageError
from elastic.train.groups import ProcessGroups

INTEGERS = torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128
DTYPES = INTEGERS + FLOATS


def check_loss(loss: Any) -> Tensor:
    """Raises UsageError unless it is one number that depends on a parameter."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UsageError(
            f"step.mean_loss: expected a shard's mean loss, a scalar (.mean()) with a graph, found {described(loss)}; return it without .item(), .detach() and "
            "no_grad; where a batch has nothing to learn from, (outputs * 0).sum()"
        )
    return loss


def check_summand(output: Any) -> Any:
    """Raises UsageError unless outputs like this one can be added."""
    if not (isinstance(output, Tensor) and output.layout is torch.strided and output.dtype in DTYPES):
        raise UsageError(
            f"step.sum: expected the function to return a dense tensor of a common type, found {described(output)}; "
            "call step.sum once for each tensor, or join them by torch.cat"
        )
    return output


def described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    graph = "" if value.requires_grad else ", without a graph"
    return f"a tensor of shape {list(value.shape)}, {value.dtype} and {value.layout}{graph}"


class OutputForm(NamedTuple):
    """has_graph: of any shard's output, so that the sum has a gradient."""

    shape: torch.Size
    dtype: torch.dtype
    has_graph: bool


class AgreedForms:
    """The form of each sum of a step, once all ranks have agreed on it."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._agreed: dict[tuple[int, str], OutputForm] = {}

    def check(self, number: int, function: Callable[..., Any], outputs: dict[int, Tensor]) -> OutputForm:
        """The form of the sum's summands, the same on every rank.

        outputs: of the own shards, in the call `number` of the step, of this function. Raises
        UsageError unless all shards' outputs have the form of all earlier ones; PeerLost when
        another rank is gone.
        """
        # A recipe may call one function in one step and another one in the next.
        key = number, _name_of(function)
        if key not in self._agreed:
            self._agreed[key] = self._agree(outputs)
        agreed = self._agreed[key]
        for shard, output in outputs.items():
            found = OutputForm(output.shape, output.dtype, output.requires_grad)
            if found[:2] != agreed[:2] or found.has_graph > agreed.has_graph:
                raise _differs(shard, found, agreed, "in the steps before")
        return agreed

    def _agree(self, outputs: dict[int, Tensor]) -> OutputForm:
        own = [[shard, t.requires_grad, DTYPES.index(t.dtype), *t.shape] for shard, t in outputs.items()]
        rows = sorted(row for of_rank in self._groups.all_gather(own) for row in of_rank)
        has_graph = any(row[1] for row in rows)
        forms = [OutputForm(torch.Size(shape), DTYPES[dtype], has_graph) for _, _, dtype, *shape in rows]
        for shard, found in enumerate(forms):
            if found != forms[0]:
                raise _differs(shard, found, forms[0], "for shard 0")
        return forms[0]


def _differs(shard: int, found: OutputForm, expected: OutputForm, where: str) -> UsageError:
    said = [f"shape {list(f.shape)}, {f.dtype}{', with a graph' * f.has_graph}" for f in (expected, found)]
    return UsageError(
        f"step.sum: expected a tensor of {said[0]}, as {where}, found {said[1]} for shard {shard}; sum over the samples inside the "
        "function, or pad to one size; functions of two forms, or one with .detach(), need two names"
    )


def _name_of(function: Any) -> str:
    """The same in every step and on every rank, also of a new function."""
    function = inspect.unwrap(function)
    if isinstance(function, partial):
        return _name_of(function.func)
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


class OpenSums:
    """Those of one step. is_in_shard: inside the backward of one, which must not reach a result."""

    def __init__(self, step: int) -> None:
        self._step = step
        # By number of the call: the result, and the output of each own shard.
        self._sums: dict[int, tuple[Tensor, dict[int, Tensor]]] = {}
        self.is_in_shard = False

    def __len__(self) -> int:
        return len(self._sums)

    @property
    def are_by_hand(self) -> bool:
        """Whether there are sums, and none of them waits for a backward."""
        return bool(self._sums) and not any(total.requires_grad for total, _ in self._sums.values())

    def add(self, number: int, total: Tensor, outputs: dict[int, Tensor], *, has_graph: bool) -> None:
        """number: of the call. total: the result, a leaf."""
        if has_graph:
            total.requires_grad_()
            total.register_hook(partial(self._reach, number))  # type: ignore[no-untyped-call]
        self._sums[number] = total, outputs

    def close(self) -> None:
        self._sums.clear()

    def norms(self) -> tuple[float, ...]:
        return tuple(float(torch.linalg.vector_norm(total.double())) for total, _ in self._sums.values())

    def outputs_of(self, shard: int) -> list[Tensor]:
        """One for each sum."""
        return [outputs[shard] for _, outputs in self._sums.values()]

    def backward(self, outputs: list[Tensor]) -> None:
        """From d loss / d sum into one shard's graphs.

        outputs: one for each sum. A sum for the metrics alone may have no graph.
        """
        reached, gradients = [], []
        for output, (total, _) in zip(outputs, self._sums.values(), strict=True):
            if output.requires_grad:  # the loss of a step need not depend on each of its sums
                reached.append(output)
                # A copy: autograd may give a parameter a part of it, to which others are added.
                gradients.append(torch.zeros_like(total) if total.grad is None else total.grad.clone())
        self.is_in_shard = True
        if reached:
            torch.autograd.backward(reached, gradients)
        self.is_in_shard = False

    def _reach(self, number: int, _gradient: Tensor) -> None:
        """A backward has reached the result of a sum; only that of the step's loss may."""
        if self.is_in_shard:
            raise UsageError(
                f"step {self._step}: the function of a step.sum or step.mean_loss uses the result of an earlier step.sum, whose gradient would be lost; add "
                "both in one sum (a variance: Σx and Σx²), or use the result's .detach()"
            )
        if number not in self._sums:
            raise UsageError(
                f"a loss uses the result of a step.sum of step {self._step} after a later step.backward or step.mean_loss, which ended it, so that its gradient "
                "would be lost; compute the sum again, or use the result's .detach()"
            )
