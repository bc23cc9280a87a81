"""`.grad` holds the tree sum of all shards' gradients, bit for bit the same on every rank.

With one worker these are autograd's own tensors. With several, parameters are grouped into buckets,
as in DistributedDataParallel (bucket.py): each bucket goes to the other ranks as a vector, and
`.grad` points into their sum. During the backward of the last own shard a bucket goes as soon as it
is complete, while backward computes the gradients of the next one. The last bucket, which is
complete at the end, takes the numbers of the step along (`sum`).

Buckets follow the parameters in reverse order, because backward finishes the last layers first.
They are exchanged in that one order on every rank: two ranks that start collectives in different
orders wait for each other forever.

Which parameters these are is asked at each computation: recipes freeze layers, unfreeze them, and
add some. No sum depends on earlier answers, so that a process that resumes sums what an
undisturbed one sums. In the first shard that gives a parameter a gradient a hook watches whether it
comes at once or in parts, as reentrant activation checkpointing may give it. From then on no two
shards share `.grad`, and no bucket goes early.

A parameter that no shard on any rank used keeps `.grad = None`, as in plain PyTorch. A zero instead
would let weight decay and momentum change it. Parameters that no optimizer holds may be those of a
copy that never has a gradient, which would double the exchange. So these buckets go last, and only
if a backward has reached them on any rank.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from elastic.reduce.bucket import Bucket, Show, Trained, add, changed, groups
from elastic.reduce.exchange import Exchange
from elastic.reduce.tree import fold, pairs

_DTYPE = attrgetter("dtype")
_HOLD_NUMBERS = torch.float32, torch.float64


class Gradients:
    """The gradients of the parameters that are trained, from one training step to the next.

    Call, in each computation: `begin_computation`; around each own shard's backward
    `before_backward` and `after_backward`, shards in order; `sum`, where there are several ranks;
    `assign`. parameters: those of the computation that was begun last, which require a gradient.
    """

    def __init__(self, trained: Trained, exchange: Exchange) -> None:
        self._trained = trained
        self._exchange = exchange
        self.parameters: list[nn.Parameter] = []
        self._buckets: list[Bucket] = []  # of those that an optimizer updates
        self._every: list[Bucket] = []  # and of others
        self._hooks: list[RemovableHandle] = []  # that send buckets
        # Of what they were made: lists that never change, and forms of the parameters.
        self._made_of: tuple[list[nn.Parameter], list[nn.Parameter], list[Any]] = [], [], []
        self._pair_of: dict[int, tuple[int, ...]] = {}
        self._paired: object = None  # of what that was made
        self._shown: tuple[int, ...] = ()  # a shard by itself, whose gradients are given to `_show`
        self._show: Show | None = None
        self._is_last = False  # inside the backward of the last own shard, which sends buckets
        self._sums: list[Future[Tensor] | Tensor] = []
        # One thread: collectives must start in the same order on every rank.
        self._thread = ThreadPoolExecutor(1, "exchange") if exchange.world_size > 1 else None
        # Ids of parameters that were watched; another one may get the id of a former one.
        self._known: set[int] = set()
        self._watching: dict[int, RemovableHandle] = {}  # of those that got none yet, by id
        self._seen: list[nn.Parameter] = []  # of those, each time one got a gradient in this shard
        self._is_in_parts = False
        self._watch(trained.summed)

    def begin_computation(self, shown: int | None = None, show: Show | None = None) -> None:
        """Before the first backward of a computation: no parameter has a gradient any more.

        shown: an own shard whose gradients `show` is given. They are added to those of its partner
        as tensors, and not in place by autograd, which is the same addition.
        """
        self._cut()
        self._shown, self._show = () if shown is None else (shown,), show
        self._pair()
        for bucket in self._every:
            bucket.begin()
        self._sums = []

    def begin_without(self) -> None:
        """A computation without gradients, which leaves `.grad` alone."""
        self._made_of = [], [], []
        self.parameters, self._buckets, self._every, self._sums = [], [], [], []

    def before_backward(self, shard: int) -> None:
        """Before the backward of one own shard; shards come in order, or all in reverse.

        Raises UsageError where the function has changed gradients.
        """
        is_second = shard != self._pair_of[shard][0]
        for bucket in self._every:
            bucket.begin_shard(is_second=is_second)
        self._seen.clear()
        self._is_last = shard == next(reversed(self._pair_of))

    def after_backward(self, shard: int) -> None:
        """After the backward of one own shard; the last one sends the buckets that still wait.

        A bucket still waits when it, or one before it, has a parameter that the last shard did not
        use. Raises UsageError where something else than autograd has written a gradient.
        """
        is_last, self._is_last = self._is_last, False
        num_sent = len(self._sums)
        pair = self._pair_of[shard]
        if self._seen and self._has_parts():
            self._is_in_parts = True
            pair = (shard,) if shard == pair[0] else pair
        for bucket in self._buckets[:num_sent]:  # which got no more since then, or this raises
            bucket.begin_shard(is_second=False)
        for bucket in self._every[num_sent:]:
            if shard == pair[-1]:
                self._end_block(bucket, pair)
            else:
                bucket.end_first()
        self._pair()
        while is_last and self._thread is not None and len(self._sums) < len(self._buckets) - 1:
            self._send()

    def used(self) -> list[float]:
        """[parameters]: 1 where this rank's shards gave a gradient, else 0."""
        return [float(each) for bucket in self._every for each in bucket.used]

    def wait(self) -> None:
        """For the sums that are under way. Raises PeerLost when another rank is gone."""
        self._sums = [each if isinstance(each, Tensor) else each.result() for each in self._sums]

    def sum(self, numbers: Tensor) -> Tensor:
        """End the sums over ranks: of gradients, and of the numbers of a step beside them.

        numbers: float32 [n]; each is 0 on all ranks but one, or whole and small, so that its sum is
        exact. They ride in the last bucket if its dtype holds them. Raises PeerLost when another
        rank is gone.
        """
        blocks = self._exchange.own_blocks
        last = self._buckets[-1] if self._buckets and self._buckets[-1].dtype in _HOLD_NUMBERS else None
        if self._buckets and last is None:
            self._send()
        self.wait()
        if last is None:
            begin, vectors = 0, {block: torch.zeros_like(numbers) for block in blocks}
        else:
            begin, vectors = last.length, last.pack(len(numbers))
        vectors[blocks[0]][begin:] = numbers
        total = self._exchange.sum(vectors, "the end of a step")
        self._sums += [] if last is None else [total]
        return total[begin:].float()

    def assign(self, used: Sequence[float] = ()) -> None:
        """Put the sums into `.grad`. Raises PeerLost.

        used: [parameters], the sum of all ranks' `used()`; where it is 0, `.grad` becomes None. Not
        looked at with one worker, where no sum is over ranks.
        """
        begin = 0
        for number, bucket in enumerate(self._every):
            if self._thread is None:
                bucket.assign(fold(bucket.stack.parts, self._exchange.shards, add))
                continue
            is_used = [count > 0 for count in used[begin : begin + len(bucket.parameters)]]
            begin += len(is_used)
            if number < len(self._buckets):
                flat = self._sums[number]
            elif any(is_used):
                flat = self._exchange.sum(bucket.pack(), "gradients of parameters without an optimizer")
            else:
                continue
            assert isinstance(flat, Tensor)
            views = zip(bucket.views(flat), is_used, strict=True)
            # By `.data` torch counts writes to each by itself.
            bucket.assign([view.data if is_one else None for view, is_one in views])
        for parameter in self._seen:
            if (hook := self._watching.pop(id(parameter), None)) is not None:
                hook.remove()

    def close(self) -> None:
        """Remove the hooks: a recipe may use these parameters for something else after the run."""
        for hook in (*self._watching.values(), *self._hooks):
            hook.remove()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _cut(self) -> None:
        """Cut the parameters that are trained now into buckets."""
        trained, others = self._trained.summed, self._trained.others
        forms = [*map(_DTYPE, trained), *map(Tensor.stride, trained)]
        if self._made_of[0] is trained and self._made_of[1] is others and self._made_of[2] == forms:
            return
        self._made_of = trained, others, forms
        summed = [trained[::-1]] * bool(trained) if self._thread is None else groups(trained)
        self._buckets = [Bucket(group, self._trained) for group in summed]
        self._every = [*self._buckets, *(Bucket(group, self._trained) for group in groups(others))]
        self.parameters = [p for bucket in self._every for p in bucket.parameters]
        for hook in self._hooks:
            hook.remove()
        # The parameter that backward reaches last, if it reaches them in their order.
        last_ones = [bucket.parameters[-1] for bucket in self._buckets[:-1]]
        self._hooks = [p.register_post_accumulate_grad_hook(self._reached) for p in last_ones]  # type: ignore[no-untyped-call]
        self._watch(self.parameters)

    def _pair(self) -> None:
        """Which own shards share `.grad`, in the order in which they are computed."""
        exchange = self._exchange
        of = exchange.own_shards, exchange.is_reversed, self._shown, self._is_in_parts
        if of == self._paired:
            return
        self._paired = of
        found = pairs(exchange.own_shards, *self._shown)
        if self._is_in_parts:
            found = tuple((shard,) for shard in exchange.own_shards)
        if exchange.is_reversed:
            found = tuple(pair[::-1] for pair in found[::-1])
        self._pair_of = {shard: pair for pair in found for shard in pair}

    def _reached(self, _parameter: nn.Parameter) -> None:
        """Send the buckets that are complete, in their order: one that is complete early waits."""
        if not self._is_last or self._seen or self._is_in_parts:
            return
        last = next(reversed(self._pair_of.values()))
        while (number := len(self._sums)) < len(self._buckets) - 1 and self._buckets[number].is_complete:
            self._end_block(self._buckets[number], last)
            self._send()

    def _end_block(self, bucket: Bucket, pair: tuple[int, ...]) -> None:
        bucket.end_block((min(pair), len(pair)), self._show if pair == self._shown else None)

    def _send(self) -> None:
        assert self._thread is not None
        vectors = self._buckets[len(self._sums)].pack()
        self._sums.append(self._thread.submit(self._exchange.sum, vectors, "the sum of gradients"))

    # The first computation that gives a parameter a gradient.

    def _watch(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if id(parameter) not in self._known:
                self._known.add(id(parameter))
                hook = parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                self._watching[id(parameter)] = hook

    def _accumulated(self, parameter: nn.Parameter) -> None:
        self._trained.check_backward(parameter)
        if parameter.grad is not None:  # a function of the recipe's own may give None
            self._seen.append(parameter)

    def _has_parts(self) -> bool:
        """After a shard's backward. Raises UsageError where a gradient was taken away."""
        for parameter in self._seen:
            if parameter.grad is None:
                raise changed(self._trained.name_of(parameter), parameter)
        return max(Counter(map(id, self._seen)).values()) > 1
