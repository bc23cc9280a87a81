"""Gradients of all shards, summed in the fixed tree, land in `.grad` of every rank bit for bit the same; overlapped with the last backward.

Each bucket is one flat vector per dtype and device. A shard's gradients are copied into it as they come, and `.grad` then points there, so that
autograd itself adds up aligned pairs of shards (the tree's first level). Buckets follow the parameters backwards, because that is the order in which
backward finishes them; they are exchanged in that one order on every rank, by one thread, while backward goes on.
A parameter that no shard on any rank used keeps `.grad = None`, as in plain PyTorch.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from elastic.reduce.exchange import Exchange
from elastic.reduce.tree import Block, Stack, pairs

BUCKET_BYTES = 25 * 1024 * 1024  # as DistributedDataParallel's default


class Bucket:
    """Some parameters whose gradients travel together, and the flat vectors that hold them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.length = sum(p.numel() for p in parameters)
        self._like = parameters[0]
        self._free: list[Tensor] = []
        self._flat: Tensor | None = None
        self._views: dict[nn.Parameter, Tensor] = {}
        self.stack: Stack[Tensor] = Stack(self._add)

    def begin(self) -> None:
        """Take a vector for the next shards' gradients, and let autograd put the first of them wherever it likes."""
        self._flat = (
            self._free.pop()
            if self._free
            else torch.empty(self.length, dtype=self._like.dtype, device=self._like.device)
        )
        self._views = dict(zip(self.parameters, self._cut(self._flat), strict=True))
        for parameter in self.parameters:
            parameter.grad = None

    def keep(self, parameter: nn.Parameter) -> None:
        """After autograd gave `parameter` a gradient: have it in the vector."""
        view = self._views[parameter]
        if parameter.grad is not view:
            # One copy is cheaper than zeros to begin with and an addition.
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view

    def fill(self) -> None:
        """After a shard's backward: what it gave no gradient counts as zero."""
        for parameter, view in self._views.items():
            if parameter.grad is not view:
                parameter.grad = view.zero_()

    def point(self, flat: Tensor) -> None:
        for parameter, view in zip(self.parameters, self._cut(flat), strict=True):
            parameter.grad = view

    def _cut(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def end(self, block: Block) -> None:
        """What `.grad` holds is the sum of this block's shards."""
        assert self._flat is not None
        self.stack.push(block, self._flat)
        self._flat = None

    def reset(self) -> None:
        """The vectors of the last step may be used again: whoever wants its gradients has them no longer."""
        self._free += self.stack.parts.values()
        self.stack = Stack(self._add)

    def _add(self, left: Tensor, right: Tensor) -> Tensor:
        left.add_(right)
        self._free.append(right)
        return left


class Gradients:
    """The gradients of one training step of `parameters` (those that require grad)."""

    def __init__(self, parameters: Iterable[nn.Parameter], exchange: Exchange) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._exchange = exchange
        self._groups = pairs(exchange.leaves)
        self._buckets = _buckets(self.parameters)
        self._bucket_of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket.parameters}
        self._missing = [0] * len(self._buckets)
        self._next = 0
        self._is_last = False
        self._is_open = False  # between `before` and `after`; other backwards are not ours
        self._used: set[nn.Parameter] = set()
        self._sums: list[Future[Tensor] | Tensor] = []
        # A thread of its own, one: collectives must start in the same order on every rank.
        self._thread = ThreadPoolExecutor(1, "exchange") if exchange.world_size > 1 else None
        hook = self._accumulated
        self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in self.parameters]  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Before the first backward of a step."""
        for bucket in self._buckets:
            bucket.reset()
        self._used.clear()
        self._sums = []
        self._next = 0
        self._is_last = False

    def before(self, leaf: int) -> None:
        """Before the backward of one own shard; shards come in order."""
        group = self._group(leaf)
        if leaf == group.start:
            for bucket in self._buckets:
                bucket.begin()
        self._is_open = True
        if leaf == self._exchange.leaves[-1]:
            self._missing = [len(bucket.parameters) for bucket in self._buckets]
            self._is_last = True

    def after(self, leaf: int) -> None:
        """After the backward of one own shard. After the last one, what is not under way yet is sent."""
        group = self._group(leaf)
        self._is_open = False
        if leaf == self._exchange.leaves[-1]:
            self._is_last = False
            while self._next < len(self._buckets):
                self._send()
            return
        for bucket in self._buckets:
            bucket.fill()
            if leaf == group[-1]:
                bucket.end(Block(group.start, len(group)))

    def used(self) -> Tensor:
        """float64 [parameters]: 1 where this rank's shards gave a gradient."""
        return torch.tensor([p in self._used for p in self.parameters], dtype=torch.float64)

    def wait(self) -> list[Tensor]:
        """The flat sums, once all are there; for norms over all gradients. Raises PeerLost when another rank is gone."""
        return [pending.result() if isinstance(pending, Future) else pending for pending in self._sums]

    def place(self, flats: list[Tensor], used: Tensor) -> None:
        """Put the sums into `.grad`; `used`, [parameters], is above 0 where any rank gave a gradient."""
        for bucket, flat in zip(self._buckets, flats, strict=True):
            bucket.point(flat)
        for parameter, count in zip(self.parameters, used.tolist(), strict=True):
            if count == 0:
                parameter.grad = None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _group(self, leaf: int) -> range:
        return next(group for group in self._groups if leaf in group)

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if not self._is_open:
            return
        self._used.add(parameter)
        place = self._bucket_of[parameter]
        self._buckets[place].keep(parameter)
        if not self._is_last:
            return
        self._missing[place] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        group = self._groups[-1]
        bucket.fill()
        bucket.end(Block(group.start, len(group)))
        if self._thread is None:
            self._sums.append(self._exchange.sum(bucket.stack.parts, "the sum of gradients"))
        else:
            self._sums.append(
                self._thread.submit(self._exchange.sum, bucket.stack.parts, "the sum of gradients")
            )


def _buckets(parameters: list[nn.Parameter]) -> list[Bucket]:
    buckets: list[Bucket] = []
    open_by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        group = open_by_kind.setdefault(kind, [])
        group.append(parameter)
        if sum(p.numel() * p.element_size() for p in group) >= BUCKET_BYTES:
            buckets.append(Bucket(open_by_kind.pop(kind)))
    return buckets + [Bucket(group) for group in open_by_kind.values()]
