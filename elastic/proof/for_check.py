"""For `elastic-train check`: what a step leaves behind is written down entry by entry.

Rank 0 writes one line for each step of each generation: its evidence, and what the recipe logged.
A run ends where the check has enough steps, or drains after the step that it names. Without a check
there is no trace, and no step pays for it.

In a calm run by one worker the first gradient is compared with that of one plain backward of the
whole global batch. The two agree as closely as
arithmetic allows if the loss is a mean over samples (or made of sums over them), as the library
takes it to be. Where samples of a shard see each other (BatchNorm), or random numbers are drawn by
shard (dropout), both are computed once more with all modules in eval mode: the gradient is another
one, but the loss is still the same mean of it. They cannot be compared where random numbers are
drawn in eval mode too, or where the function needs a batch of a shard's size.
"""

import json
import math
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from elastic.config.environment import CheckRequest
from elastic.observe.step_line import StepLine
from elastic.proof.audit import Auditor, Backward, Call, Compute, Function
from elastic.proof.evidence import Evidence, FirstGradient, TraceLine
from elastic.system.clock import Clock
from elastic.train.state import structure

T = TypeVar("T")
R = TypeVar("R")

BATCH_NORM = "BatchNorm normalises within a shard"
DRAWN = "random numbers are drawn for each shard"
NOT_FINITE = "the gradient of step 1 is not finite"


class _Obstacle(Exception):  # noqa: N818
    """Why the gradients cannot be compared."""


class WholeBatchGradient:
    """Stands where the audit of a step does; `found` is None until a gradient was computed."""

    cost_s = 0.0

    def __init__(self, parts: Auditor, step: int, compute: Compute) -> None:
        self._parts = parts
        self._step = step
        self._compute = compute
        self._modules = structure.submodules(parts.state.modules)
        self._shards = parts.loader.order.shards
        # Of each call whose backward is to come: the output of the whole batch, those of the
        # shards, and why they are of eval mode.
        self._calls: list[tuple[Tensor, list[Tensor], str]] = []
        self._why_eval = BATCH_NORM if _normalises(self._modules) else ""
        self._obstacle = ""
        self.found: FirstGradient | None = None

    def add_sum(self, function: Function, number: int) -> None:
        with self._parts.undisturbed():
            self._call(function, number)

    def check_sums(self, backward: Backward) -> None:
        with self._parts.undisturbed():
            self._compare(backward, 1.0)

    def check_loss(self, function: Function, number: int, backward: Callable[[Tensor], None]) -> None:
        with self._parts.undisturbed():
            self._call(function, number)
            # `backward` takes a shard's loss, whose weight in the mean is one over the shards.
            self._compare(lambda outputs: backward(outputs[-1]), float(self._shards))

    def _call(self, function: Function, number: int) -> None:
        if self._obstacle or self.found is not None:
            return
        try:
            whole, shards = self._comparable(function, number)
            self._calls.append((whole, shards, self._why_eval))
        except _Obstacle as obstacle:
            self._obstacle = str(obstacle)

    def _comparable(self, function: Function, number: int) -> tuple[Tensor, list[Tensor]]:
        """The outputs of the whole batch and of the shards. Raises _Obstacle."""
        if not self._why_eval:
            whole, shards, has_drawn = self._outputs(function, number)
            if not has_drawn:
                return whole, shards
            self._why_eval = DRAWN
        with _evaluating(self._modules):
            whole, shards, has_drawn = self._outputs(function, number)
            if _normalises(self._modules):  # it has no averages, or the function called `train`
                raise _Obstacle(BATCH_NORM)
        if has_drawn:
            raise _Obstacle(DRAWN)
        return whole, shards

    def _outputs(self, function: Function, number: int) -> tuple[Tensor, list[Tensor], bool]:
        """Of the whole batch, of the shards, and whether any of them drew random numbers.

        Raises _Obstacle.
        """
        loader, collating, computing = self._parts.loader, list[bool](), list[bool]()
        if loader.collate is not None:
            loader = replace(loader, collate=_watched(loader.collate, collating))
        call = Call(function=_watched(function, computing), number=number, buffers=None, modes=None)
        outputs: list[Tensor] = []
        for shard in (None, *range(self._shards)):
            with _obstacle("collate does not take the whole batch"):
                batch = loader.whole(self._step) if shard is None else loader.shard(self._step, shard)
            if any(collating):  # mixup there: the whole batch has other samples than the shards
                raise _Obstacle(f"{DRAWN}, by collate")
            with _obstacle("the function does not take the whole batch"):
                outputs.append(self._compute(call, batch))
        return outputs[0], outputs[1:], any(computing)

    def _compare(self, backward: Backward, weight: float) -> None:
        """weight: of the whole batch's gradient."""
        if self.found is not None:
            return
        try:
            if self._obstacle or len({why for *_, why in self._calls}) > 1:
                raise _Obstacle(self._obstacle or self._why_eval)
            parameters = list(self._parts.of_steps.gradients.sums())
            by_shards = [list(each) for each in zip(*(shards for _, shards, _ in self._calls), strict=True)]
            found = self._gradient(parameters, backward, by_shards)
            expected = self._gradient(parameters, backward, [[whole for whole, *_ in self._calls]])
            self.found = self._difference(found, expected, weight)
        except _Obstacle as obstacle:
            self.found = FirstGradient(difference=None, parameter="", obstacle=str(obstacle))
        self._calls = []

    def _gradient(
        self, parameters: Iterable[nn.Parameter], backward: Backward, parts: list[list[Tensor]]
    ) -> dict[nn.Parameter, Tensor]:
        """The sum over parts of the batch, each with its outputs. Raises _Obstacle."""
        for parameter in parameters:
            parameter.grad = None
        with _obstacle("the backward does not take the whole batch"):
            for outputs in parts:
                backward(outputs)
        return {p: torch.zeros_like(p) if p.grad is None else p.grad for p in parameters}

    def _difference(
        self, found: dict[nn.Parameter, Tensor], expected: dict[nn.Parameter, Tensor], weight: float
    ) -> FirstGradient:
        """Raises _Obstacle."""
        total, expected_total, furthest, name = 0.0, 0.0, 0.0, ""
        for parameter, gradient in found.items():
            plain = weight * expected[parameter]
            distance = float((gradient.double() - plain.double()).square().sum())
            total, expected_total = total + distance, expected_total + float(plain.double().square().sum())
            if distance > furthest:
                furthest, name = distance, self._parts.state.name_of(parameter)
        if not math.isfinite(total) or not math.isfinite(expected_total):
            raise _Obstacle(NOT_FINITE)
        return FirstGradient(
            difference=(total / expected_total) ** 0.5 if expected_total else float(total > 0),
            parameter=name,
            obstacle="",
            in_eval=self._why_eval,
        )


def _watched(function: Callable[[T], R], drawn: list[bool]) -> Callable[[T], R]:
    """The same function, which adds to `drawn` whether it drew random numbers."""

    def watched(given: T) -> R:
        before = _generators()
        result = function(given)
        drawn.append(_generators() != before)
        return result

    return watched


@contextmanager
def _obstacle(text: str) -> Iterator[None]:
    """The recipe's code, given what it was not written for: a failure there says nothing of it."""
    try:
        yield
    except Exception as error:
        raise _Obstacle(f"{text} ({type(error).__name__}: {error!s:.80})") from error


@contextmanager
def _evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """All these modules in eval mode, set in the attribute: recipes override `train`."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _normalises(modules: list[nn.Module]) -> bool:
    """Whether any of them normalises by what it finds in the batch."""
    return any(
        isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        for module in modules
    )


def _generators() -> tuple[object, ...]:
    """The states of the global generators."""
    of_numpy: Any = np.random.get_state()  # noqa: NPY002 - the generator that recipes draw from
    has_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    of_device = torch.cuda.get_rng_state().numpy().tobytes() if has_device else b""
    of_torch = torch.get_rng_state().numpy().tobytes()
    return of_torch, of_device, random.getstate(), of_numpy[1].tobytes(), of_numpy[2]


class StateTrace:
    def __init__(self, request: CheckRequest, *, writes: bool, agent_pid: int, clock: Clock) -> None:
        """writes: on rank 0 alone, which also asks the agent to leave."""
        self._request = request
        self._path = Path(request.trace) if writes else None
        self._agent_pid = agent_pid
        self._clock = clock
        self._began_s = clock.monotonic()
        self._notes: list[str] = []

    def note(self, sentence: str) -> None:
        """What the run says on its console stands in the next line."""
        self._notes.append(sentence)

    def wants_drain(self, step: int) -> bool:
        """Whether the node is to leave after this step, exactly as if it were told to."""
        if step != self._request.leave_at:
            return False
        if self._path is not None:
            os.kill(self._agent_pid, signal.SIGTERM)
        return True

    def compares_gradient(self, step: int) -> bool:
        """Whether a WholeBatchGradient watches this step, in the place of an audit."""
        return self._request.gradient and step == 1

    def add(self, line: StepLine, found: Evidence, *, steps: int, shards: int, audit: object) -> None:
        """Write a step down. steps, shards: of the run. audit: of the step, if it has one."""
        if self._path is None:
            return
        written = TraceLine(
            step=line.step,
            generation=line.generation,
            world_size=line.world_size,
            steps=steps,
            shards=shards,
            entries=found.entries
            | {f"step.log({name}=...)": repr(value) for name, value in line.values.items()},
            gradient=audit.found if isinstance(audit, WholeBatchGradient) else None,
            epoch=line.epoch,
            notes=self._notes,
        )
        self._notes = []
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(written)) + "\n")

    def is_over(self, step: int) -> bool:
        """Whether the check needs no step after this one."""
        seconds = self._clock.monotonic() - self._began_s
        return step >= self._request.least_steps and seconds >= self._request.seconds
