"""No gradient is thrown away before an update has used it, unless the recipe drops it itself.

A computation replaces `.grad`. In plain PyTorch the second of two backwards adds to it, so a recipe
that accumulates by hand, or that takes two losses one after another, would silently lose the first.
A gradient counts as used once an optimizer that has its parameter has made a step, or once the
parameter was changed in place or got other memory. At the end of its step a used gradient goes: a
process that takes over at the next step has none, and the recipe must not find it there either.

This is of parameters that an optimizer of torch holds; loose_gradients.py has the others. It does
not see an update of them through `.data`, which autograd does not count: such a recipe sets its
gradients to zero itself, as it must in plain PyTorch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, repeat

import torch
from torch import nn

from elastic.errors import UsageError
from elastic.train.step.parameter_marks import ParameterMarks, marks_of

# What a parameter was when it got its gradient: itself, so that no other one gets its id; its
# version and its address; and the step.
GradientMark = tuple[nn.Parameter, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The marks of all parameters of a computation, as lists, until an update uses some of them."""

    parameters: Sequence[nn.Parameter]
    names: frozenset[int]
    marks: ParameterMarks
    step: int

    def by_id(self) -> dict[int, GradientMark]:
        values = zip(self.parameters, *self.marks, repeat(self.step))
        return dict(zip(map(id, self.parameters), values, strict=True))


class UnusedGradients:
    """Which gradients of the trained parameters an update has used.

    The sequences of parameters that it is given must not change.
    """

    def __init__(self) -> None:
        self.step = 0
        self._given: _Given | None = None
        # By the parameter's id. A parameter in neither has its gradient from before the loop, or
        # from the recipe's own hand.
        self._marks: dict[int, GradientMark] = {}
        self._used: set[int] = set()
        self._known: tuple[Sequence[nn.Parameter], frozenset[int]] = (), frozenset()

    def gained(self, parameter: nn.Parameter) -> None:
        """A backward has just given, or added to, this parameter's gradient."""
        self._spread()
        version = parameter._version  # noqa: SLF001 - autograd's count of changes in place
        self._marks[id(parameter)] = parameter, version, parameter.data_ptr(), self.step
        self._used.discard(id(parameter))

    def computed(
        self, parameters: Sequence[nn.Parameter], *, is_finite: bool, known: ParameterMarks | None = None
    ) -> None:
        """A computation has given these parameters their gradients.

        Those that are not finite need not be used: a GradScaler skips their update. known: the
        marks of the parameters as they are now, for a caller that has them.
        """
        self._spread()
        names = self._names(parameters)
        given = _Given(
            parameters=parameters,
            names=names,
            marks=known or marks_of(parameters),
            step=self.step,
        )
        waits = [is_finite and p.grad is not None for p in parameters]
        for name in names if self._marks else ():
            self._marks.pop(name, None)
        if all(waits):
            self._given = given
            self._used -= names
        else:
            new = dict(compress(given.by_id().items(), waits))
            self._marks |= new
            self._used.update(names)
            self._used.difference_update(new)

    def replace(
        self, parameters: Sequence[nn.Parameter], frozen: Sequence[nn.Parameter]
    ) -> nn.Parameter | None:
        """Before a computation: the first parameter whose gradient it would throw away, if any.

        parameters: all that are trained. frozen: those of them that require no gradient now, which
        lose one that was used: an optimizer would apply it again in every step.
        """
        self._spread()
        names = self._names(parameters)
        if self._used != names:
            self._used &= names  # no others, whose ids may be given to new ones
        if not self._marks.keys() <= names:
            self._marks = {name: mark for name, mark in self._marks.items() if name in names}
        is_all_used = len(self._used) == len(names)
        for parameter in frozen:
            if is_all_used or self._is_used(parameter):
                parameter.grad = None
        for parameter in () if is_all_used else parameters:
            is_kept = parameter.requires_grad and not self._is_used(parameter)
            gradient = parameter.grad if is_kept else None
            if gradient is not None and bool(torch.count_nonzero(gradient)):
                return parameter
        return None

    def has_waiting(self) -> bool:
        """Whether a computation's gradient waits for its update."""
        self._spread()
        return any(p.grad is not None and not self._is_used(p) for p, *_ in self._marks.values())

    def drop_used(self, parameters: Sequence[nn.Parameter]) -> None:
        """At a step's end: a process that begins at the next step has none of its gradients."""
        self._spread()
        is_all_used = not self._marks and self._names(parameters) <= self._used
        used = (
            parameters if is_all_used else [p for p in parameters if p.grad is not None and self._is_used(p)]
        )
        for parameter in used:
            parameter.grad = None

    def _is_used(self, parameter: nn.Parameter) -> bool:
        mark = self._marks.get(id(parameter))
        if mark is None:
            return id(parameter) in self._used
        _, version, address, _ = mark
        return version != parameter._version or address != parameter.data_ptr()  # noqa: SLF001 - autograd's count

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step. Raises UsageError if its gradients are of another step."""
        for group in optimizer.param_groups:
            self._check_steps(optimizer, group["params"])
            # Also those of the recipe's own hand.
            self._used.update([id(parameter) for parameter in group["params"] if parameter.grad is not None])
        if self._given is not None and self._given.names <= self._used:
            self._given = None
        self._spread()
        if self._marks.keys() <= self._used:
            self._marks = {}
        else:
            self._marks = {name: mark for name, mark in self._marks.items() if name not in self._used}

    def _check_steps(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        if self._given is not None and self._given.step != self.step:
            self._spread()
        if {step for _, _, _, step in self._marks.values()} <= {self.step}:
            return
        for parameter in parameters:
            mark = self._marks.get(id(parameter))
            if mark is not None and mark[3] != self.step:
                raise UsageError(
                    f"step {self.step}: {type(optimizer).__name__} made an update with gradients of step {mark[3]}; gradients are no part "
                    "of the state, so that a resume between the two steps would lose them: call the optimizer in the step that computed them"
                )

    def _spread(self) -> None:
        """One mark for each parameter, where they are no longer used all at once."""
        if self._given is not None:
            self._marks |= self._given.by_id()
            self._given = None

    def _names(self, parameters: Sequence[nn.Parameter]) -> frozenset[int]:
        """Their ids. The sequence is almost always that of the last call."""
        if self._known[0] is not parameters:
            self._known = parameters, frozenset(map(id, parameters))
        return self._known[1]
