"""One flat vector holds the gradients of several parameters, and the sum of each pair of shards.

A shard's gradients are copied into the vector as autograd produces them, and `.grad` then points
into it, so that autograd itself adds the second shard of an aligned pair (the first level of the
tree, see tree.py). A gradient that a shard does not give counts as +0.0 at every level of the tree,
so that the sign of a zero is the same too.

Vectors are used again in the next computation with the views that shards add to, unless the recipe
has kept a gradient that lies in one: a gradient never changes while something refers to it. The
gradients of a step are other views, since a recipe may do with those what it likes.

A hook is called for each parameter and shard, so the names here are numbers (`id`): a tensor's own
hash is a call of Python.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from elastic.errors import UsageError
from elastic.reduce.tree import Block, Stack

_NAMED = 3
BUCKET_BYTES = 25 * 1024 * 1024  # as DistributedDataParallel's default
_STRIDED = torch.strided  # read once: torch's own namespace is a large one
Show = Callable[[nn.Parameter, Tensor], None]  # is given the gradient of each parameter


class Trained(Protocol):
    """What gradients are computed for.

    required: parameters that require a gradient now, in a list that never changes. others: those
    that no optimizer updates and that require a gradient now, in one order.
    """

    required: list[nn.Parameter]
    others: list[nn.Parameter]

    def name_of(self, parameter: nn.Parameter) -> str: ...

    def accumulated_outside(self, parameter: nn.Parameter) -> None:
        """A backward that is none of a shard's added to this parameter's `.grad`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Vector:
    """views: of `flat`, by the id of the parameter whose gradient each holds."""

    flat: Tensor
    views: dict[int, Tensor]

    @property
    def is_free(self) -> bool:
        """Whether nothing else refers to it or to a part of it."""
        is_alone = references(self.flat) == ONE_REFERENCE + len(self.views)
        return is_alone and max(map(sys.getrefcount, self.views.values())) <= ONE_NAME


class Bucket:
    """Some parameters whose gradients travel together, and the flat vectors that hold them.

    ids: theirs. missing: of those that this shard gave no gradient yet.
    """

    def __init__(self, parameters: list[nn.Parameter], names: Trained) -> None:
        self.parameters = parameters
        self.ids = frozenset(map(id, parameters))
        self.length = sum(p.numel() for p in parameters)
        self.missing: set[int] = set()
        self.stack: Stack[Tensor] = Stack(self._add)
        self._names = names
        self._vectors: dict[int, _Vector] = {}  # by the id of the flat tensor
        self._free: list[Tensor] = []
        self._flat: Tensor | None = None
        self._views: dict[int, Tensor] = {}  # of that
        self._is_second = False  # inside the second shard of a pair
        self._left: tuple[Tensor, int] | None = None  # where `.grad` points, and its version then

    def begin_pair(self) -> None:
        """Take a vector for the next pair of shards. `.grad = None` until a gradient comes."""
        for parameter in self.parameters:
            parameter.grad = None
        vector = self._free_vector()
        self._flat, self._views = vector.flat, vector.views

    def begin_shard(self, *, is_second: bool) -> None:
        """Raises UsageError where the function has changed the gradients of the shards before."""
        if self._left is not None and self._left[0]._version != self._left[1]:  # noqa: SLF001 - autograd's count
            self._refuse(self.parameters[0])
        self.missing = set(self.ids)
        self._is_second = is_second

    def collect(self, parameter: nn.Parameter) -> None:
        """Move the gradient that autograd just gave `parameter` into the vector.

        Only the first shard of a pair needs the copy: autograd puts its gradient wherever it likes,
        and from then on adds to `.grad` in place, which is the vector. One copy is cheaper than
        zeroing the vector beforehand and adding to it.

        Raises UsageError for a gradient that is sparse, or of another dtype than the parameter,
        that a hook took away, that comes in parts, or of a parameter that the function has frozen
        since.
        """
        name = id(parameter)
        if name not in self.missing:
            # As reentrant activation checkpointing gives it, where two checkpointed parts share a
            # weight. In a second shard (a + b1) + b2 would not be a + (b1 + b2).
            raise UsageError(
                f"expected the gradient of {self._names.name_of(parameter)} at once in each shard, found it in parts; with activation checkpointing, pass "
                "use_reentrant=False to torch.utils.checkpoint.checkpoint"
            )
        self.missing.discard(name)
        gradient, view = parameter.grad, self._views[name]
        if self._is_second:
            if gradient is not view:
                self._refuse(parameter)
        elif gradient is None:
            self._refuse(parameter)
        else:
            if gradient.layout is not _STRIDED:
                raise UsageError(
                    f"expected a dense gradient of {self._names.name_of(parameter)}, found a sparse one, which is not summed over shards; "
                    "build the layer without sparse=True (nn.Embedding, nn.EmbeddingBag) and take an optimizer for dense gradients"
                )
            if gradient.dtype is not view.dtype:
                raise UsageError(
                    f"expected gradients of {self._names.name_of(parameter)} in its own dtype, {view.dtype}, found {gradient.dtype}; leave grad_dtype as torch "
                    "sets it, and return that dtype from a backward of your own; for more digits keep the parameter in float32"
                )
            view.copy_(gradient)
            parameter.grad = view

    def _refuse(self, parameter: nn.Parameter) -> None:
        """Raises UsageError."""
        name = self._names.name_of(parameter)
        if parameter.grad is None and not parameter.requires_grad:
            raise UsageError(left_changed([name], is_frozen=True))
        raise UsageError(
            f"expected the gradient of {name} to stay in .grad until all shards are summed, found it changed or taken by zero_grad(), a hook or an optimizer "
            "in the function; call these in the loop's body, after backward"
        )

    def fill_missing(self) -> None:
        """After a shard's backward: a gradient that it did not give counts as +0.0 in the tree.

        Where the first shard of the pair gave one, the zero is really added, because -0.0 + 0.0 is
        +0.0. Two ranks with one shard each do likewise. Raises UsageError where the shard did give
        one.
        """
        missing, self.missing = self.missing, set()
        for parameter in self.parameters if missing else ():
            if id(parameter) in missing:
                view = self._views[id(parameter)]
                if parameter.grad is not None and not self._is_second:  # autograd called no hook
                    raise UsageError(
                        f"expected the tensor that {self._names.name_of(parameter)} had when the loop began, found another one; leave torch.utils.swap_tensors "
                        "out of the loop: copy the numbers, under torch.no_grad()"
                    )
                parameter.grad = view.add_(0.0) if self._is_second else view.zero_()
        if (flat := self._flat) is not None:
            self._left = flat, flat._version  # noqa: SLF001

    def end_pair(self, pair: tuple[int, ...], show: Show | None = None) -> None:
        """The vector holds the sum of these shards: hand it to the stack.

        show: is given what the vector holds at the last moment before it joins the sum.
        """
        assert self._flat is not None
        if show is not None:
            for parameter in self.parameters:
                show(parameter, self._views[id(parameter)])
        self.stack.push(Block(min(pair), len(pair)), self._flat)
        self._left = self._flat, self._flat._version  # noqa: SLF001 - the stack may have added to it
        self._flat = None

    def recycle(self) -> None:
        """Take back the vectors of the last step, whose gradients are not needed any more."""
        self._free += self.stack.parts.values()
        self.stack, self._left = Stack(self._add), None

    def _free_vector(self) -> _Vector:
        """A vector to which nothing else refers: the recipe may have kept an earlier gradient."""
        while self._free:
            vector = self._vectors[id(self._free.pop())]
            if vector.is_free:
                return vector
            del self._vectors[id(vector.flat)]
        flat = self.parameters[0].new_empty(self.length)
        views = dict(zip(map(id, self.parameters), cut(flat, self.parameters), strict=True))
        self._vectors[id(flat)] = vector = _Vector(flat, views)
        return vector

    def _add(self, left: Tensor, right: Tensor) -> Tensor:
        """In the memory of the left one, whichever of the two came last."""
        left.add_(right)
        self._free.append(right)
        return left


def left_changed(names: list[str], *, is_frozen: bool) -> str:
    """What the user reads. names: of parameters that the function has frozen, or unfrozen."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"the function given to step.mean_loss or step.sum has {'frozen' if is_frozen else 'unfrozen'} {', '.join(names[:_NAMED])}{more} (requires_grad = "
        f"{not is_frozen}) and leaves that so; set requires_grad in the loop's body, or put it back before the function returns"
    )


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


def references(tensor: Tensor) -> int:
    """How many tensors use this one's memory, more or less: compare with ONE_REFERENCE."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # noqa: SLF001


ONE_REFERENCE = references(torch.empty(1))
ONE_NAME = max(map(sys.getrefcount, {0: object()}.values()))
