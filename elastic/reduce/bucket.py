"""The gradients of some parameters: lists of autograd's own tensors, added up in the tree's order.

`.grad` is None before the first shard of an aligned pair, and autograd adds the second shard to it
in place: that is the first level of the tree (tree.py). The levels above add one list of tensors to
another. A gradient that a shard does not give counts as +0.0 at every level, so that the sign of a
zero is the same too. Only the vector that goes to other ranks copies gradients, and `_own`.

Autograd may give several parameters parts of one memory, or the very same memory (of `p.view(-1) +
q.view(-1)`), to which no sum may be added. Such a gradient is copied first (`_own`).

Torch counts how often a tensor was written to. After the second shard of a pair each gradient was
written to once more than after the first; any other count is a gradient that came in parts, or that
something else has changed, and is refused.
"""

from collections.abc import Callable
from functools import partial
from itertools import compress
from operator import attrgetter, is_, is_not
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage, nn

from elastic.errors import UsageError
from elastic.reduce.tree import Block, Stack

_NAMED = 3
BUCKET_BYTES = 25 * 1024 * 1024  # as DistributedDataParallel's default
# In a vector each gradient begins where memory of its own would, as far as kernels can tell: those
# that multiply matrices choose by it, and may round differently.
ALIGNED_BYTES = 64
_GRAD, _VERSION, _FORM = attrgetter("grad"), attrgetter("_version"), attrgetter("dtype", "layout")
_is_there = partial(is_not, None)
Show = Callable[[nn.Parameter, Tensor], None]  # is given the gradient of each parameter
Given = list[Tensor | None]  # the gradient of each parameter, None where no shard gave one


class Trained(Protocol):
    """What gradients are computed for.

    summed: parameters that require a gradient now, in a list that never changes. others: those
    that no optimizer updates and that require a gradient now, in one order.
    """

    summed: list[nn.Parameter]
    others: list[nn.Parameter]

    def name_of(self, parameter: nn.Parameter) -> str: ...

    def check_backward(self, parameter: nn.Parameter) -> None:
        """A backward gave this parameter a gradient. Raises UsageError inside a step's function."""


class Bucket:
    """Some parameters whose gradients travel together, one shard's after another's.

    length: numbers in the vector that holds them. dtype: of the first one. stack: what the blocks
    of shards gave so far.
    """

    def __init__(self, parameters: list[nn.Parameter], names: Trained) -> None:
        self.parameters = parameters
        self.names = names
        self.length = 0
        self._nothing: Given = [None] * len(parameters)
        self._forms = [(p.dtype, torch.strided) for p in parameters]
        self._sizes_bytes = [p.numel() * p.element_size() for p in parameters]
        self._places: list[tuple[torch.Size, tuple[int, ...], int]] = []
        for p in parameters:
            self._places.append((p.shape, _strides(p), self.length))
            aligned = ALIGNED_BYTES // p.element_size()
            self.length += -(-p.numel() // aligned) * aligned
        self.dtype = parameters[0].dtype if parameters else None
        self.begin()

    def begin(self) -> None:
        """No parameter has a gradient any more."""
        self.stack: Stack[Given] = Stack(add)
        self._used: list[bool] | None = None  # where the blocks were packed
        self._is_second = False  # in the second shard of a pair
        self._first: Given = self._nothing  # what the first shard of a pair gave
        # How often each of those was written to then, and is to be after the second shard.
        self._versions: tuple[list[int], list[int]] = [], []
        self._clear()

    def begin_shard(self, *, is_second: bool) -> None:
        """Raises UsageError where a function has changed `.grad` since the shard before."""
        self._is_second = is_second
        if not is_second:
            self._first, self._versions = self._nothing, ([], [])
        self._check(is_after=False)

    @property
    def is_complete(self) -> bool:
        """Whether this shard has given a gradient to each parameter."""
        found = list(map(_GRAD, self.parameters))
        if not all(map(_is_there, found)):
            return False
        return not self._is_second or list(map(_VERSION, found)) == self._versions[True]

    def end_first(self) -> None:
        """After the backward of the first shard of a pair, whose second one follows."""
        self._first = self._own()
        versions = list(map(_VERSION, filter(_is_there, self._first)))
        self._versions = versions, list(map((1).__add__, versions))

    def end_block(self, block: Block, show: Show | None = None) -> None:
        """`.grad` holds the sum of these shards: it joins those before, and `.grad` is None again.

        show: is given the gradients as they join. Raises UsageError where `.grad` is not what
        autograd makes of the two shards of a pair.
        """
        is_as_left = self._is_second and self._check(is_after=True)
        found = self._first if is_as_left else self._own()
        if show is not None:
            for parameter, gradient in zip(self.parameters, found, strict=True):
                show(parameter, torch.zeros_like(parameter) if gradient is None else gradient)
        self._clear()
        self.stack.push(block, found)

    @property
    def used(self) -> list[bool]:
        """Of each parameter, whether a shard gave it a gradient."""
        if self._used is not None:
            return self._used
        blocks = self.stack.parts.values()
        return [any(given[i] is not None for given in blocks) for i in range(len(self.parameters))]

    def assign(self, gradients: Given) -> None:
        """Put them into `.grad`."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def pack(self, room: int = 0) -> dict[Block, Tensor]:
        """One vector of each block, and behind its gradients `room` numbers, which are 0."""
        found, self._used = {}, self.used
        for block, given in self.stack.parts.items():
            found[block] = flat = self.parameters[0].new_empty(self.length + room)
            flat[self.length :] = 0
            views = self.views(flat)
            for view, gradient in zip(views, given, strict=True) if not all(map(_is_there, given)) else ():
                if gradient is None:
                    view.zero_()
            if any(map(_is_there, given)):
                torch._foreach_copy_([*compress(views, map(_is_there, given))], there(given))
        self.stack = Stack(add)
        return found

    def views(self, flat: Tensor) -> list[Tensor]:
        """Where each gradient lies in a vector, in the form that autograd would give it."""
        begin = flat.storage_offset()
        return [flat.as_strided(shape, strides, begin + at) for shape, strides, at in self._places]

    def _refuse_forms(self, given: Given) -> None:
        for parameter, gradient in zip(self.parameters, given, strict=True):
            if gradient is not None and _FORM(gradient) != (parameter.dtype, torch.strided):
                raise UsageError(
                    f"expected a dense gradient of {self.names.name_of(parameter)}, of {parameter.dtype}, found one of {gradient.dtype} and {gradient.layout}; build layers without "
                    "sparse=True, take an optimizer for dense gradients, and return the parameter's dtype from a backward of your own"
                )

    def _own(self) -> Given:
        """What is in `.grad`, each gradient in a memory that no other one has a part of.

        Raises UsageError for a sparse gradient, or one of another dtype than its parameter.
        """
        found: Given = list(map(_GRAD, self.parameters))
        which = list(map(_is_there, found))
        forms = list(map(_FORM, compress(found, which)))
        if forms != self._forms and forms != list(compress(self._forms, which)):
            self._refuse_forms(found)
        memory = list(map(Tensor.untyped_storage, compress(found, which)))  # type: ignore[arg-type]
        sizes_bytes = list(map(UntypedStorage.nbytes, memory))
        is_whole = sizes_bytes == self._sizes_bytes or sizes_bytes == list(compress(self._sizes_bytes, which))
        if is_whole and len(set(map(UntypedStorage.data_ptr, memory))) == len(memory):
            return found
        self.assign([None if gradient is None else gradient.clone() for gradient in found])
        return list(map(_GRAD, self.parameters))

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _check(self, *, is_after: bool) -> bool:
        """Raises UsageError unless `.grad` is what the first shard of the pair has left there.

        is_after: of the second one, which has added its gradients. One that only one of the two
        gave gets the zero of the other one, and the answer is False.
        """
        found = list(map(_GRAD, self.parameters))
        written = list(map(_VERSION, filter(_is_there, found)))
        if written == self._versions[is_after] and all(map(is_, found, self._first)):
            return True
        versions = iter(self._versions[is_after])
        for parameter, first, now in zip(self.parameters, self._first, found, strict=True):
            missing = 0 if first is None else next(versions) - first._version  # noqa: SLF001
            is_one = is_after and now is not None and (first is None or (first is now and missing == 1))
            if is_one and now is not None:
                now.add_(0.0)  # -0.0 + 0.0 is +0.0
            elif now is not first or missing != 0:
                raise changed(self.names.name_of(parameter), parameter)
        return False


def changed(name: str, parameter: nn.Parameter) -> UsageError:
    """Its gradient is not what autograd makes of a shard, or of the two of a pair."""
    if parameter.grad is None and not parameter.requires_grad:
        return UsageError(left_changed([name], is_frozen=True))
    return UsageError(
        f"expected autograd alone to write the gradient of {name}, once a shard, found it changed or in parts; call zero_grad(), hooks and "
        "optimizers in the loop's body, and checkpoint with use_reentrant=False"
    )


def left_changed(names: list[str], *, is_frozen: bool) -> str:
    """What the user reads. names: of parameters that the function has frozen, or unfrozen."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"the function given to step.mean_loss or step.sum has {'frozen' if is_frozen else 'unfrozen'} {', '.join(names[:_NAMED])}{more} (requires_grad = "
        f"{not is_frozen}) and leaves that so; set requires_grad in the loop's body, or put it back before the function returns"
    )


def groups(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters of each bucket: of one dtype and device, in reverse order."""
    groups: list[list[nn.Parameter]] = []
    open_by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        group = open_by_kind.setdefault(kind, [])
        group.append(parameter)
        if sum(p.numel() * p.element_size() for p in group) >= BUCKET_BYTES:
            groups.append(open_by_kind.pop(kind))
    return groups + list(open_by_kind.values())


def there(given: Given) -> list[Tensor]:
    """Without the missing ones."""
    return [gradient for gradient in given if gradient is not None]


def add(left: Given, right: Given) -> Given:
    """In the memory of the left one, whichever of the two came last."""
    if all(map(_is_there, left)) and all(map(_is_there, right)):
        torch._foreach_add_(left, right)  # type: ignore[arg-type] # mypy does not see that none is missing
        return left
    found: Given = []
    for one, other in zip(left, right, strict=True):
        given = other if one is None else one
        if given is not None:
            given.add_(0.0 if one is None or other is None else other)
        found.append(given)
    return found


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Of the gradient that autograd gives it: its own, or in one row where it lies with gaps."""
    own = parameter.stride()
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() == own:
        return own
    return torch.empty(parameter.shape, device="meta").stride()
