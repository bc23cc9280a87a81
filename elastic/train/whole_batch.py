"""The first gradient of a run, beside that of one plain backward of the whole global batch.

It is made for `elastic-train check` alone, in a calm run by one worker. The two agree as closely as
arithmetic allows if the loss is a mean over samples (or made of sums over them), as the library
takes it to be. They cannot be compared where samples of a shard see each other (BatchNorm), where
random numbers are drawn by shard (dropout), or where the function needs a batch of a shard's size.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from elastic.data.loader import Batch
from elastic.system.trace_line import FirstGradient
from elastic.train import structure
from elastic.train.audit import Auditor, Backward, Call, Compute, Function


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstGradientCheck:
    """Begins the comparison, as an Auditor begins an audit."""

    parts: Auditor

    def begin(self, step: int, compute: Compute) -> "WholeBatchGradient":
        return WholeBatchGradient(self.parts, step, compute)


class WholeBatchGradient:
    """Stands where the audit of a step does; `found` is None until a gradient was computed."""

    own = -1  # of no shard is anything recorded
    cost_s = 0.0

    def __init__(self, parts: Auditor, step: int, compute: Compute) -> None:
        self._parts = parts
        self._compute = compute
        self._batch = parts.loader.whole(step)
        self._outputs: list[Tensor] = []
        self._obstacle = _normalises(parts.state.modules)
        self.found: FirstGradient | None = None

    def before(self, call: Call, batch: Batch) -> None:
        """Nothing to record."""

    def after(self, number: int, output: Tensor) -> None:
        """Nothing to record."""

    def see_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Nothing to record."""

    def add_sum(self, function: Function, number: int) -> None:
        with self._parts.undisturbed():
            self._call(function, number)

    def check_sums(self, backward: Backward) -> None:
        with self._parts.undisturbed():
            self._compare(lambda: backward(self._outputs), 1.0)
        self._outputs = []

    def check_loss(self, function: Function, number: int, backward: Callable[[Tensor], None]) -> None:
        with self._parts.undisturbed():
            self._call(function, number)
            # `backward` takes a shard's loss, whose weight in the mean is one over the shards.
            shards = self._parts.loader.order.shards
            self._compare(lambda: backward(self._outputs[-1]), float(shards))
        self._outputs = []

    def _call(self, function: Function, number: int) -> None:
        if self._obstacle is not None or self.found is not None:
            return
        drawn: list[bool] = []

        def watched(batch: Batch) -> Tensor:
            before = _generators()
            output = function(batch)
            drawn.append(_generators() != before)
            return output

        try:
            self._outputs.append(
                self._compute(Call(function=watched, number=number, buffers=None), self._batch)
            )
        # The recipe's code, given what it was not written for. A failure here says nothing of it.
        except Exception as error:
            self._obstacle = (
                f"the function does not take the whole batch ({type(error).__name__}: {error!s:.80})"
            )
            return
        if any(drawn):
            self._obstacle = "random numbers are drawn for each shard"

    def _compare(self, backward: Callable[[], None], weight: float) -> None:
        if self.found is not None:
            return
        if self._obstacle is not None:
            self._found(None, "", self._obstacle)
            return
        sums = self._parts.gradients.sums()
        for parameter in sums:
            parameter.grad = None
        backward()
        total, expected_total, furthest, name = 0.0, 0.0, 0.0, ""
        for parameter, found in sums.items():
            expected = torch.zeros_like(found) if parameter.grad is None else weight * parameter.grad
            distance = float((found.double() - expected.double()).square().sum())
            total, expected_total = total + distance, expected_total + float(expected.double().square().sum())
            if distance > furthest:
                furthest, name = distance, self._parts.state.name_of(parameter)
        difference = (total / expected_total) ** 0.5 if expected_total else float(total > 0)
        self._found(difference, name, "")

    def _found(self, difference: float | None, parameter: str, obstacle: str) -> None:
        self.found = FirstGradient(
            difference=difference,
            parameter=parameter,
            obstacle=obstacle,
        )


def _normalises(modules: list[nn.Module]) -> str | None:
    for module in structure.submodules(modules):
        if isinstance(module, _BatchNorm) and module.training:
            return "BatchNorm normalises within a shard"
    return None


def _generators() -> tuple[object, ...]:
    """The states of the global generators."""
    of_numpy: Any = np.random.get_state()  # noqa: NPY002 - the generator that recipes draw from
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), of_numpy[1].tobytes(), of_numpy[2]
