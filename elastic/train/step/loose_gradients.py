"""Parameters that no optimizer of torch holds have their gradients as in plain PyTorch, for a step.

An optimizer of the recipe's own, or a line of the loop, updates them, and no hook says when. So
within a step a second computation adds to a gradient that nothing has used, as a second backward
does. At the end of the step the gradient goes: it is no part of the state. An update after steps
without one would lack what those gave, and is refused. Beside optimizers of torch it is only named:
it is rather a target network that the loop copies now and then, and whose gradients nothing reads.

An update counts if it changes the version or the address of any of these parameters, or one of a
few numbers of each: a write through `.data` has no other sign. It does not see an update that
changes none of them.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from elastic.errors import UsageError
from elastic.train.step.parameter_marks import ParameterMarks, marks_of

FEW = 64  # numbers of one parameter that are compared


class LooseGradients:
    """Set `step` and call `end_step` in each step, `begin` and `end` around each computation.

    name_of: of a parameter, for an error. sizes: what to start with in the place of accumulation.
    """

    def __init__(self, name_of: Callable[[nn.Parameter], str], sizes: str) -> None:
        self._name_of = name_of
        self._sizes = sizes
        self.step = 0
        self.note = ""  # what to tell the user, of the newest step
        self._are_alone = True  # no optimizer of torch holds any parameter
        self._old: dict[nn.Parameter, Tensor] = {}  # gradients from before the loop
        self._given: dict[nn.Parameter, int] = {}  # in this step, with the version of the gradient
        self._added_to: dict[nn.Parameter, Tensor] = {}
        self._marked: list[nn.Parameter] = []
        self._mark = ParameterMarks([], [])
        self._few: list[Tensor] = []  # views of a few numbers of each
        self._numbers: list[Tensor] = []  # copies of them, one for each device
        self._unused_since: int | None = None  # the first step since an update that left gradients
        self._was_updated = False

    def begin_loop(self, parameters: Iterable[nn.Parameter]) -> None:
        """parameters: all that may have a gradient."""
        self._old = {p: p.grad for p in parameters if p.grad is not None}

    def begin(self, parameters: Sequence[nn.Parameter], *, are_alone: bool) -> None:
        """parameters: those that require a gradient; afterwards none of them has one.

        are_alone: no optimizer of torch holds any parameter. Raises UsageError for a gradient from
        before the loop.
        """
        self._are_alone = are_alone
        if self._given and self._is_updated():
            for parameter in self._given:
                parameter.grad = None
            self._note_update()
            self._given = {}
        self._added_to = {p: p.grad for p in parameters if p.grad is not None}
        for parameter, gradient in self._added_to.items():
            if self._old.get(parameter) is gradient:
                raise UsageError(
                    f"step {self.step}: {self._name_of(parameter)} has a gradient from before the loop, and this computation would add to it; a "
                    "worker that resumes would add it in another step: set its .grad to None before the loop (model.zero_grad())"
                )
            parameter.grad = None

    def end(self, parameters: Sequence[nn.Parameter]) -> None:
        """The computation has given them the sums over all shards."""
        for parameter, before in self._added_to.items():
            parameter.grad = before if parameter.grad is None else before + parameter.grad
        self._added_to = {}
        self._given = {p: p.grad._version for p in parameters if p.grad is not None}  # noqa: SLF001 - autograd's count
        self._take_mark()

    def gained(self, parameter: nn.Parameter) -> None:
        """A backward of the recipe's own has given it a gradient."""
        if parameter.grad is not None:
            is_first = not self._given
            self._given[parameter] = parameter.grad._version  # noqa: SLF001 - autograd's count
            if is_first or not any(parameter is each for each in self._marked):
                self._take_mark()

    def has_waiting(self) -> bool:
        """Whether this step's gradients wait for an update such as an earlier step has made."""
        return self._are_alone and bool(self._given) and self._was_updated and not self._is_updated()

    def end_step(self) -> None:
        """Raises UsageError for an update that lacks the gradients of earlier steps."""
        if not self._given:
            return
        if self._is_updated():
            self._note_update()
        elif self._unused_since is None and any(map(_is_unused, self._given.items())):
            self._unused_since = self.step
        for parameter in self._given:
            parameter.grad = None
        self._given = {}

    def _note_update(self) -> None:
        since = self._unused_since
        # At first a write through .data may have changed nothing, as one with a learning rate of 0.
        if since is not None and since < self.step and (self._was_updated or self._counts_update()):
            found = (
                f"step {self.step}: {self._name_of(self._marked[0])}, or another parameter that no optimizer of torch in the State holds, has changed, and "
                f"gradients since step {since} were not used: at the end of its step a gradient goes. A step already accumulates: for k batches in one "
                f"change start with k times the batch, as {self._sizes}. Where nothing needs these gradients, set .grad to None in their step "
                "(model.zero_grad()), or freeze the parameters by requires_grad_(False)"
            )
            if self._are_alone:
                raise UsageError(found)
            self.note = f"note: {found}"
        self._unused_since, self._was_updated = None, True

    def _take_mark(self) -> None:
        marked, before = list(self._given), self._mark
        mark = marks_of(marked)
        if mark.addresses != before.addresses or len(marked) != len(self._marked):
            self._few = [each for p in marked if (each := _few_of(p)) is not None]
        self._marked, self._mark = marked, mark
        self._numbers = _copied(self._few)

    def _counts_update(self) -> bool:
        return marks_of(self._marked) != self._mark

    def _is_updated(self) -> bool:
        return self._counts_update() or not all(map(torch.equal, self._numbers, _copied(self._few)))


def _few_of(parameter: nn.Parameter) -> Tensor | None:
    """A view of its first numbers, as they lie in memory."""
    count = min(FEW, parameter.numel())
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided or not count:
        return None
    is_dense = parameter.untyped_storage().nbytes() >= count * parameter.element_size()
    return parameter.detach().as_strided((count if is_dense else 1,), (1,))


def _copied(views: Sequence[Tensor]) -> list[Tensor]:
    of_kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for view in views:
        of_kinds.setdefault((view.device, view.dtype), []).append(view)
    return [torch.cat(each) for each in of_kinds.values()]


def _is_unused(given: tuple[nn.Parameter, int]) -> bool:
    """Whether the recipe has not dropped the gradient."""
    parameter, version = given
    gradient = parameter.grad
    if gradient is None:
        return False
    is_as_given = gradient._version == version  # noqa: SLF001 - autograd's count of changes
    return is_as_given or bool(torch.count_nonzero(gradient))
