"""The gradient of a loss passes from the result of each `step.sum` into the graphs of its shards.

A sum is open until a backward, or the end of the step, has used it. Until then the graphs of all
own shards are kept. A backward that reaches the result of a sum from elsewhere would lose the
function's part of the gradient, and is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from elastic.errors import UsageError


class OpenSums:
    """Those of one step."""

    def __init__(self, step: int) -> None:
        self._step = step
        # By number of the call: the result, and the output of each own shard.
        self._sums: dict[int, tuple[Tensor, dict[int, Tensor]]] = {}
        self._is_in_shard = False

    def __len__(self) -> int:
        return len(self._sums)

    @property
    def have_graph(self) -> bool:
        """Whether any of them waits for a backward."""
        return any(total.requires_grad for total, _ in self._sums.values())

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

    def fill_gradients(self) -> None:
        """The loss of a step need not depend on each of its sums."""
        for total, _ in self._sums.values():
            if total.requires_grad and total.grad is None:
                total.grad = torch.zeros_like(total)

    def outputs_of(self, shard: int) -> list[Tensor]:
        """One for each sum."""
        return [outputs[shard] for _, outputs in self._sums.values()]

    def backward(self, outputs: list[Tensor]) -> None:
        """From d loss / d sum into one shard's graphs.

        outputs: one for each sum. A sum for the metrics alone may have no graph.
        """
        reached = [
            (output, total.grad)
            for output, (total, _) in zip(outputs, self._sums.values(), strict=True)
            if output.requires_grad
        ]
        with self.in_shard():
            if reached:
                torch.autograd.backward(
                    [output for output, _ in reached], [gradient for _, gradient in reached]
                )

    @contextmanager
    def in_shard(self) -> Iterator[None]:
        """Inside the backward of one shard, which must not reach a result."""
        self._is_in_shard = True
        try:
            yield
        finally:
            self._is_in_shard = False

    def _reach(self, number: int, _gradient: Tensor) -> None:
        """A backward has reached the result of a sum; only that of the step's loss may."""
        if self._is_in_shard:
            raise UsageError(
                f"step {self._step}: the function of a step.sum or step.mean_loss uses the result of an earlier step.sum, and its gradient would have "
                "to go through all shards of that one again; add up in one sum what both need (a variance follows from Σx and Σx²), or use the "
                "result's .detach()"
            )
        if number not in self._sums:
            raise UsageError(
                f"a loss uses the result of a step.sum of step {self._step} after a later step.backward or step.mean_loss, which ended what it belongs "
                "to: the gradient would not reach the function's parameters. Compute the sum again, or use the result's .detach()"
            )
