"""One flat vector holds the gradients of several parameters, and the sum of each pair of shards.

A shard's gradients are copied into the vector as autograd produces them, and `.grad` then points
into it, so that autograd itself adds the second shard of an aligned pair (the first level of the
tree, see tree.py). A gradient that a shard does not give counts as +0.0 at every level of the tree,
so that the sign of a zero is the same too.

Vectors are used again in the next computation, unless the recipe has kept a gradient that lies in
one: a gradient never changes while something refers to it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from elastic.errors import UsageError
from elastic.reduce.gradient_flags import left_changed
from elastic.reduce.tree import Block, Stack

BUCKET_BYTES = 25 * 1024 * 1024  # as DistributedDataParallel's default
Show = Callable[[nn.Parameter, Tensor], None]  # is given the gradient of each parameter


class Trained(Protocol):
    """What gradients are computed for."""

    def trained(self) -> Sequence[nn.Parameter]:
        """The parameters that an optimizer updates, frozen ones too; in one order on every rank."""

    def required(self) -> list[nn.Parameter]:
        """Those that require a gradient now, in a list that never changes."""

    def others(self) -> Sequence[nn.Parameter]:
        """Parameters that no optimizer updates and that require a gradient now, in one order."""

    def name_of(self, parameter: nn.Parameter) -> str: ...

    def accumulated_outside(self, parameter: nn.Parameter) -> None:
        """A backward that is none of a shard's added to this parameter's `.grad`."""


class Bucket:
    """Some parameters whose gradients travel together, and the flat vectors that hold them."""

    def __init__(self, parameters: list[nn.Parameter], names: Trained) -> None:
        self.parameters = parameters
        self.length = sum(p.numel() for p in parameters)
        self.missing: set[nn.Parameter] = set()  # those that this shard gave no gradient yet
        self.is_sent = False
        # Those that autograd adds to more than once in one shard's backward, as reentrant
        # activation checkpointing does where two checkpointed parts share a weight.
        self.repeated: set[nn.Parameter] = set()
        self.stack: Stack[Tensor] = Stack(self._add)
        self._names = names
        self._free: list[Tensor] = []
        self._flat: Tensor | None = None
        self._views: dict[nn.Parameter, Tensor] = {}
        self._is_second = False  # inside the second shard of a pair

    def begin_pair(self) -> None:
        """Take a vector for the next pair of shards. `.grad = None` until a gradient comes."""
        for parameter in self.parameters:
            parameter.grad = None
        self._views = {}  # before `_take`, which counts who refers to a vector
        self._flat = self._take()
        self._views = dict(zip(self.parameters, cut(self._flat, self.parameters), strict=True))

    def begin_shard(self, *, is_second: bool) -> None:
        self.missing = set(self.parameters)
        self._is_second = is_second
        if is_second:
            # (a + b1) + b2 is not a + (b1 + b2): the shard's own sum is made first, by itself.
            for parameter in self.repeated:
                parameter.grad = None

    def collect(self, parameter: nn.Parameter) -> None:
        """Move the gradient that autograd just gave `parameter` into the vector.

        Only the first shard of a pair needs the copy: autograd puts its gradient wherever it likes,
        and from then on adds to `.grad` in place, which is the vector. One copy is cheaper than
        zeroing the vector beforehand and adding to it.

        Raises UsageError for a gradient that is sparse, that a hook took away, that came in parts
        where none did before, or of a parameter that the function has frozen since.
        """
        if parameter not in self.missing:
            self._collect_again(parameter)
            return
        self.missing.discard(parameter)
        gradient, view = parameter.grad, self._views[parameter]
        waits = self._is_second and parameter in self.repeated
        if gradient is None and not parameter.requires_grad:
            raise UsageError(left_changed([self._names.name_of(parameter)], is_frozen=True))
        if gradient is None or (self._is_second and gradient is not view and not waits):
            raise UsageError(
                f"expected the gradient of {self._names.name_of(parameter)} to stay in .grad until all shards' gradients are summed, "
                "but it was taken away or replaced: by zero_grad() in the function given to step.mean_loss or step.sum, by a hook, or by an "
                "optimizer that steps inside backward. A shard's gradient is only a part: call zero_grad() and step() of the optimizer in the loop's "
                "body, after step.mean_loss(...) or step.backward(...)"
            )
        gradient = dense(parameter, self._names)
        if not waits and gradient is not view:
            view.copy_(gradient)
            parameter.grad = view

    def fill_missing(self) -> None:
        """After a shard's backward: a gradient that it did not give counts as +0.0 in the tree.

        Where the first shard of the pair gave one, the zero is really added, because -0.0 + 0.0 is
        +0.0. Two ranks that hold one shard of the pair each add it as well.
        """
        for parameter in self.missing:
            view = self._views[parameter]
            parameter.grad = view.add_(0.0) if self._is_second else view.zero_()
        if self._is_second:
            for parameter in self.repeated - self.missing:
                assert parameter.grad is not None
                parameter.grad = self._views[parameter].add_(parameter.grad)
        self.missing = set()

    def end_pair(self, pair: tuple[int, ...], show: Show | None = None) -> None:
        """The vector holds the sum of these shards: hand it to the stack.

        show: is given what the vector holds at the last moment before it joins the sum.
        """
        assert self._flat is not None
        if show is not None:
            for parameter, view in self._views.items():
                show(parameter, view)
        self.stack.push(Block(pair[0], len(pair)), self._flat)
        self._flat = None

    @property
    def like(self) -> Tensor:
        """A tensor of the form of its vectors, without their memory."""
        first = self.parameters[0]
        return torch.empty((), dtype=first.dtype, device=first.device).expand(self.length)

    def recycle(self) -> None:
        """Take back the vectors of the last step, whose gradients are not needed any more."""
        self._free += self.stack.parts.values()
        self.stack = Stack(self._add)
        self.is_sent = False

    def _take(self) -> Tensor:
        """A vector that nothing else refers to: the recipe may have kept a gradient that it was."""
        while self._free:
            vector = self._free.pop()
            if _references(vector) == ONE_REFERENCE:
                return vector
        return self.parameters[0].new_empty(self.length)

    def _collect_again(self, parameter: nn.Parameter) -> None:
        if parameter in self.repeated:
            return
        if self._is_second or self.is_sent:
            raise UsageError(
                f"the gradient of {self._names.name_of(parameter)} came in several parts within one shard, and in one part in the "
                "shards before, so that its sum would depend on the number of workers; with activation checkpointing, pass "
                "use_reentrant=False to torch.utils.checkpoint.checkpoint"
            )
        self.repeated.add(parameter)

    def _add(self, left: Tensor, right: Tensor) -> Tensor:
        left.add_(right)
        self._free.append(right)
        return left


def dense(parameter: nn.Parameter, names: Trained) -> Tensor:
    """Its gradient. Raises UsageError for a sparse one."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise UsageError(
            f"expected a dense gradient of {names.name_of(parameter)}, found a sparse one, which is not summed over shards; "
            "build the layer without sparse=True (nn.Embedding, nn.EmbeddingBag) and take an optimizer for dense gradients"
        )
    return gradient


def cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A vector cut into views of the shapes of `like`."""
    parts = flat.split_with_sizes([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


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


def _references(tensor: Tensor) -> int:
    """How many tensors use this one's memory, more or less: compare with ONE_REFERENCE."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # noqa: SLF001


ONE_REFERENCE = _references(torch.empty(1))
