"""No gradient is thrown away before an update has used it, unless the recipe drops it itself.

A computation replaces `.grad`. In plain PyTorch the second of two backwards adds to it, so a recipe
that accumulates by hand, or that takes two losses one after another, would silently lose the first.
A gradient counts as used once an optimizer that has its parameter has made a step, or once the
parameter was changed in place or got other memory.

It does not see an update through `.data`, which autograd does not count: such a recipe sets its
gradients to zero itself, as it must in plain PyTorch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from elastic.errors import UsageError


class Mark(NamedTuple):
    """What a parameter was when it got its gradient."""

    parameter: nn.Parameter  # kept, so that no other one gets its id
    version: int
    address: int
    step: int


class UnusedGradients:
    """Which gradients of the trained parameters an update has used."""

    def __init__(self) -> None:
        self.step = 0
        # By the parameter's id; None for a gradient that was used. A parameter without an entry has
        # its gradient from before the loop, or from the recipe's own hand.
        self._marks: dict[int, Mark | None] = {}

    def gained(self, parameter: nn.Parameter) -> None:
        """A backward has just given, or added to, this parameter's gradient."""
        version = parameter._version  # noqa: SLF001 - autograd's count of changes in place
        self._marks[id(parameter)] = Mark(parameter, version, parameter.data_ptr(), self.step)

    def computed(self, parameters: Sequence[nn.Parameter], *, is_finite: bool) -> None:
        """A computation has given these parameters their gradients.

        Those that are not finite need not be used: a GradScaler skips their update.
        """
        step = self.step
        self._marks.update(
            (id(p), Mark(p, p._version, p.data_ptr(), step) if is_finite and p.grad is not None else None)  # noqa: SLF001
            for p in parameters
        )

    def replace(self, parameters: Sequence[nn.Parameter]) -> nn.Parameter | None:
        """Before a computation: the first parameter whose gradient it would throw away, if any.

        parameters: all that are trained. Those that are frozen now lose a gradient that was used:
        an optimizer would apply it again in every step.
        """
        marks = {id(p): self._marks[id(p)] for p in parameters if id(p) in self._marks}
        self._marks = marks  # of no others, whose ids may be given to new ones
        for parameter in parameters:
            is_used = marks.get(id(parameter), self) is None or not self._is_unused(parameter)
            if not parameter.requires_grad and is_used:
                parameter.grad = None
            elif parameter.requires_grad and not is_used:
                gradient = parameter.grad
                if gradient is not None and bool(torch.count_nonzero(gradient)):
                    return parameter
        return None

    def _is_unused(self, parameter: nn.Parameter) -> bool:
        if id(parameter) not in self._marks:
            return True
        mark = self._marks[id(parameter)]
        return (
            mark is not None
            and mark.version == parameter._version  # noqa: SLF001 - autograd's count of changes
            and mark.address == parameter.data_ptr()
        )

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step. Raises UsageError if its gradients are of another step."""
        marks = self._marks
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                mark = marks.get(id(parameter))
                if mark is not None and mark.step != self.step:
                    raise UsageError(
                        f"step {self.step}: {type(optimizer).__name__} made an update with gradients of step {mark.step}; gradients are no part "
                        "of the state, so that a resume between the two steps would lose them: call the optimizer in the step that computed them"
                    )
                if parameter.grad is not None:  # also one of the recipe's own hand
                    marks[id(parameter)] = None
