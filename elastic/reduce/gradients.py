"""`.grad` holds the tree sum of all shards' gradients, bit for bit the same on every rank.

Parameters are grouped into buckets, as in DistributedDataParallel: each bucket is one flat vector
of one dtype on one device. A shard's gradients are copied into the vector as autograd produces
them, and `.grad` then points into it, so that autograd itself adds the second shard of an aligned
pair (the first level of the tree, see tree.py). A gradient that a shard does not give counts as
+0.0 at every level of the tree, so that the sign of a zero is the same too. During the backward of
the last shard, each bucket that is complete goes to the other ranks at once, while backward
computes the gradients of the next bucket.

Buckets follow the parameters in reverse order, because backward finishes the last layers first.
They are exchanged in that one order on every rank, by one thread: two ranks that start collectives
in different orders wait for each other forever.

A parameter that no shard on any rank used keeps `.grad = None`, as in plain PyTorch. A zero instead
would let weight decay and momentum change it.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

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
        self._free: list[Tensor] = []
        self._flat: Tensor | None = None
        self._views: dict[nn.Parameter, Tensor] = {}
        self.missing: set[nn.Parameter] = set()  # those that this shard gave no gradient yet
        self.stack: Stack[Tensor] = Stack(self._add)

    def begin_pair(self) -> None:
        """Take a vector for the next pair of shards. `.grad = None` until a gradient comes."""
        self._flat = self._free.pop() if self._free else self.parameters[0].new_empty(self.length)
        self._views = dict(zip(self.parameters, cut(self._flat, self.parameters), strict=True))
        for parameter in self.parameters:
            parameter.grad = None

    def begin_shard(self) -> None:
        self.missing = set(self.parameters)

    def collect(self, parameter: nn.Parameter) -> None:
        """Move the gradient that autograd just gave `parameter` into the vector.

        Only the first shard of a pair needs the copy: autograd puts its gradient wherever it likes,
        and from then on adds to `.grad` in place, which is the vector. One copy is cheaper than
        zeroing the vector beforehand and adding to it.
        """
        self.missing.discard(parameter)
        view = self._views[parameter]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view

    def fill_missing(self) -> None:
        """After a shard's backward: a gradient that it did not give counts as +0.0 in the tree.

        Where the first shard of the pair gave one, the zero is really added, because -0.0 + 0.0 is
        +0.0. Two ranks that hold one shard of the pair each add it as well.
        """
        for parameter in self.missing:
            view = self._views[parameter]
            if parameter.grad is view:
                view.add_(0.0)
            else:
                parameter.grad = view.zero_()
        self.missing = set()

    def end_pair(self, pair: tuple[int, ...]) -> None:
        """The vector holds the sum of these shards: hand it to the stack."""
        assert self._flat is not None
        self.stack.push(Block(pair[0], len(pair)), self._flat)
        self._flat = None

    def recycle(self) -> None:
        """Take back the vectors of the last step, whose gradients are not needed any more."""
        self._free += self.stack.parts.values()
        self.stack = Stack(self._add)

    def _add(self, left: Tensor, right: Tensor) -> Tensor:
        left.add_(right)
        self._free.append(right)
        return left


class Gradients:
    """The gradients of `parameters` (those that require grad), from one training step to the next.

    Call, in each step: `begin_step`; around each own shard's backward `before_backward` and
    `after_backward`, shards in order; `wait` for the sums; `assign` them to `.grad`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], exchange: Exchange) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._exchange = exchange
        self._pairs = pairs(exchange.own_shards)
        self._buckets = _buckets(self.parameters)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._is_last = False  # inside the backward of the last own shard, which sends buckets
        self._next = 0
        self._is_open = False  # inside a shard's backward; a backward of the recipe's own is not ours
        self._used: set[nn.Parameter] = set()
        self._sums: list[Future[Tensor] | Tensor] = []
        # One thread: collectives must start in the same order on every rank.
        self._thread = ThreadPoolExecutor(1, "exchange") if exchange.world_size > 1 else None
        hook = self._accumulated
        self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in self.parameters]  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """Before the first backward of a step: no parameter has a gradient any more."""
        for parameter in self.parameters:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.recycle()
        self._used.clear()
        self._sums = []
        self._next = 0

    def before_backward(self, shard: int) -> None:
        """Before the backward of one own shard; shards come in order."""
        for bucket in self._buckets:
            if shard == self._pair_of(shard)[0]:
                bucket.begin_pair()
            bucket.begin_shard()
        self._is_open = True
        self._is_last = shard == self._exchange.own_shards[-1]

    def after_backward(self, shard: int) -> None:
        """After the backward of one own shard; the last one sends the buckets that still wait.

        A bucket still waits when it, or one before it, has a parameter that the last shard did not
        use.
        """
        self._is_open = False
        if self._is_last:
            while self._next < len(self._buckets):
                self._send()
            return
        pair = self._pair_of(shard)
        for bucket in self._buckets:
            bucket.fill_missing()
            if shard == pair[-1]:
                bucket.end_pair(pair)

    def used(self) -> Tensor:
        """float64 [parameters]: 1 where this rank's shards gave a gradient, else 0."""
        return torch.tensor([p in self._used for p in self.parameters], dtype=torch.float64)

    def wait(self) -> list[Tensor]:
        """The summed flat vector of each bucket, once all are there.

        Raises PeerLost when another rank is gone.
        """
        return [pending.result() if isinstance(pending, Future) else pending for pending in self._sums]

    def assign(self, flats: list[Tensor], used: Tensor) -> None:
        """Put the sums into `.grad`.

        used: [parameters], the sum of all ranks' `used()`; where it is 0, `.grad` becomes None.
        """
        counts = dict(zip(self.parameters, used.tolist(), strict=True))
        for bucket, flat in zip(self._buckets, flats, strict=True):
            for parameter, view in zip(bucket.parameters, cut(flat, bucket.parameters), strict=True):
                parameter.grad = view if counts[parameter] else None

    def close(self) -> None:
        """Remove the hooks: a recipe may use these parameters for something else after the run."""
        for hook in self._hooks:
            hook.remove()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _pair_of(self, shard: int) -> tuple[int, ...]:
        return next(pair for pair in self._pairs if shard in pair)

    def _accumulated(self, parameter: nn.Parameter) -> None:
        """Autograd's hook: `parameter.grad` holds this shard's gradient, or the pair's sum."""
        if not self._is_open:
            return
        self._used.add(parameter)
        self._bucket_of[parameter].collect(parameter)
        # Send in bucket order only: a bucket that is complete early waits for those before it.
        while self._is_last and self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.fill_missing()
        bucket.end_pair(self._pairs[-1])
        run = partial(self._exchange.sum, bucket.stack.parts, "the sum of gradients")
        self._sums.append(run() if self._thread is None else self._thread.submit(run))


def cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A vector cut into views of the shapes of `like`."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


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
