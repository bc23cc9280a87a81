"""`.grad` holds the tree sum of all shards' gradients, bit for bit the same on every rank.

Parameters are grouped into buckets, as in DistributedDataParallel (bucket.py). During the backward
of the last shard, each bucket that is complete goes to the other ranks at once, while backward
computes the gradients of the next bucket.

Buckets follow the parameters in reverse order, because backward finishes the last layers first.
They are exchanged in that one order on every rank, by one thread: two ranks that start collectives
in different orders wait for each other forever.

Which parameters these are is asked at each computation: recipes freeze layers, unfreeze them, and
add some. No sum depends on earlier answers, so that a process that resumes sums what an
undisturbed one sums. Parameters that come and go cost nothing once their layout is known.

A parameter that no shard on any rank used keeps `.grad = None`, as in plain PyTorch. A zero instead
would let weight decay and momentum change it.

Parameters that no optimizer holds may be updated by the recipe itself, or be those of a copy that
never has a gradient, which would double the exchange. So one of them gets a place in a bucket
once a backward has reached it on any rank. In that first computation its shards' gradients are kept
apart, and summed when all ranks know of it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from elastic.reduce.bucket import Bucket, Show, Trained, cut, groups
from elastic.reduce.exchange import Exchange
from elastic.reduce.tree import pairs

# So many layouts are kept with their vectors, the newest ones: the networks of a GAN take turns.
MOST_LAYOUTS = 3


class Layout:
    """A set of parameters that is summed in one computation, cut into buckets.

    trained: in buckets of their own, which come first. joined: others.
    """

    def __init__(self, trained: list[nn.Parameter], names: Trained, joined: list[nn.Parameter]) -> None:
        self.trained = trained
        self.joined = joined
        self.parameters = [*trained, *joined]
        self.dtypes = [p.dtype for p in self.parameters]
        of_trained = groups(trained)
        self.buckets = [Bucket(group, names) for group in (*of_trained, *groups(joined))]
        self.ids = list(map(id, self.parameters))
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.ids}


class Gradients:
    """The gradients of the parameters that are trained, from one training step to the next.

    Call, in each computation: `begin_computation`; around each own shard's backward
    `before_backward` and `after_backward`, shards in order; `wait` for the sums; `assign` them to
    `.grad`.
    """

    def __init__(self, trained: Trained, exchange: Exchange) -> None:
        self._trained = trained
        self._exchange = exchange
        self._pairs = pairs(exchange.own_shards)
        self._shown: tuple[int, ...] = ()  # a shard by itself, whose gradients are given to `_show`
        self._show: Show | None = None
        self._is_paused = False
        self._layouts: OrderedDict[object, Layout] = OrderedDict()
        self._layout = Layout([], trained, [])
        self._joined: dict[nn.Parameter, None] = {}  # others that a backward has reached
        self._late: list[nn.Parameter] = []  # others, of this computation, that none had reached
        self._late_parts: dict[nn.Parameter, dict[int, Tensor]] = {}  # by shard
        self._shard = 0  # whose backward runs
        self._is_last = False  # inside the backward of the last own shard, which sends buckets
        self._next = 0
        self._is_open = False  # inside a shard's backward; a backward of the recipe's own is not ours
        self._used: set[int] = set()  # ids of parameters
        self._sums: list[Future[Tensor] | Tensor] = []
        # One thread: collectives must start in the same order on every rank.
        self._thread = ThreadPoolExecutor(1, "exchange") if exchange.world_size > 1 else None
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._watch(trained.required)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of the computation that was begun last, which require a gradient."""
        return [*self._layout.parameters, *self._late]

    def begin_computation(self, shown: int | None = None, show: Show | None = None) -> None:
        """Before the first backward of a computation: no parameter has a gradient any more.

        shown: an own shard whose gradients `show` is given. They are added to those of its partner
        as vectors, and not in place by autograd, which is the same addition.
        """
        self._pairs = pairs(self._exchange.own_shards, shown)
        if self._exchange.is_reversed:
            self._pairs = tuple(pair[::-1] for pair in self._pairs[::-1])
        self._shown, self._show = () if shown is None else (shown,), show
        others = self._trained.others
        self._late = [p for p in others if p not in self._joined]
        self._late_parts = {}
        self._watch(self._late)
        self._layout = self._current_layout([p for p in others if p in self._joined])
        for parameter in self.parameters:
            parameter.grad = None
        for bucket in self._layout.buckets:
            bucket.recycle()
        self._used.clear()
        self._sums = []
        self._next = 0

    def begin_without(self) -> None:
        """A computation without gradients, which leaves `.grad` alone."""
        self._layout, self._sums, self._late = Layout([], self._trained, []), [], []

    def before_backward(self, shard: int) -> None:
        """Before the backward of one own shard; shards come in order, or all in reverse."""
        is_first = shard == self._pair_of(shard)[0]
        for bucket in self._layout.buckets:
            if is_first:
                bucket.begin_pair()
            bucket.begin_shard(is_second=not is_first)
        self._is_open, self._shard = True, shard
        self._is_last = shard == self._pairs[-1][-1]

    def after_backward(self, shard: int) -> None:
        """After the backward of one own shard; the last one sends the buckets that still wait.

        A bucket still waits when it, or one before it, has a parameter that the last shard did not
        use.
        """
        self._is_open = False
        if self._is_last:
            while self._next < len(self._layout.buckets):
                self._send()
            return
        pair = self._pair_of(shard)
        for bucket in self._layout.buckets:
            self._fill_missing(bucket)
            if shard == pair[-1]:
                self._end_pair(bucket, pair)

    def used(self) -> list[float]:
        """[parameters]: 1 where this rank's shards gave a gradient, else 0."""
        names = [*self._layout.ids, *map(id, self._late)]
        return list(map(float, map(self._used.__contains__, names)))

    def add_late(self, used: list[float]) -> None:
        """Sum the gradients of parameters that were reached for the first time, into `.grad`.

        used: as for `assign`. Every rank calls it. Raises PeerLost.
        """
        if not self._late:
            return
        flags = used[len(self._layout.parameters) :]
        reached = [p for p, count in zip(self._late, flags, strict=True) if count]
        for parameter in reached:
            parts = self._late_parts.get(parameter, {})
            of_shards = {
                shard: torch.zeros_like(parameter) if shard not in parts else parts[shard]
                for shard in self._exchange.own_shards
            }
            parameter.grad = self._exchange.sum_shards(of_shards, "gradients that came for the first time")
        self._joined.update(dict.fromkeys(reached))
        self._late_parts = {}

    def wait(self) -> list[Tensor]:
        """The summed flat vector of each bucket, once all are there.

        Raises PeerLost when another rank is gone.
        """
        return [pending.result() if isinstance(pending, Future) else pending for pending in self._sums]

    def assign(self, flats: list[Tensor], used: list[float]) -> None:
        """Put the sums into `.grad`.

        used: [parameters], the sum of all ranks' `used()`; where it is 0, `.grad` becomes None.
        """
        unused = {name for name, count in zip(self._layout.ids, used, strict=False) if not count}
        for bucket, flat in zip(self._layout.buckets, flats, strict=True):
            views = cut(flat, bucket.parameters)
            for parameter, view in zip(bucket.parameters, views, strict=True):
                parameter.grad = None if unused and id(parameter) in unused else view

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A backward inside it is of no shard in training, and none of the recipe's own either."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def close(self) -> None:
        """Remove the hooks: a recipe may use these parameters for something else after the run."""
        for hook in self._hooks.values():
            hook.remove()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _current_layout(self, joined: list[nn.Parameter]) -> Layout:
        """That of the parameters which are trained now. joined: of the others."""
        parameters = self._trained.required
        dtypes = [p.dtype for p in (*parameters, *joined)]
        layout = self._layout
        has_same = layout.trained is parameters and list(map(id, layout.joined)) == list(map(id, joined))
        if not has_same or layout.dtypes != dtypes:
            # A layout refers to its parameters, so that no other one can get the id of one of them.
            key = tuple(map(id, parameters)), tuple(map(id, joined)), tuple(dtypes)
            if key not in self._layouts:
                self._layouts[key] = Layout(parameters, self._trained, joined)
            layout = self._layouts[key]
            self._layouts.move_to_end(key)
            self._watch(layout.parameters)
            if len(self._layouts) > MOST_LAYOUTS:
                self._layouts.popitem(last=False)
        return layout

    def _watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """One hook for each parameter that requires a gradient; torch has none for others."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooks:
                hook = parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                self._hooks[parameter] = hook

    def _pair_of(self, shard: int) -> tuple[int, ...]:
        return next(pair for pair in self._pairs if shard in pair)

    def _end_pair(self, bucket: Bucket, pair: tuple[int, ...]) -> None:
        bucket.end_pair(pair, self._show if pair == self._shown else None)

    def _accumulated(self, parameter: nn.Parameter) -> None:
        """Autograd's hook: `parameter.grad` holds this shard's gradient, or the pair's sum."""
        if self._is_paused:
            return
        bucket = self._layout.bucket_of.get(id(parameter)) if self._is_open else None
        if bucket is None and self._is_open and any(parameter is each for each in self._late):
            self._keep_late(parameter)
            return
        if bucket is None:
            self._trained.accumulated_outside(parameter)
            return
        bucket.collect(parameter)
        if not self._is_last or self._thread is None:
            return  # after_backward sends it, or no other rank waits for it
        # Send in bucket order only: a bucket that is complete early waits for those before it.
        while self._next < len(self._layout.buckets) and not self._layout.buckets[self._next].missing:
            self._send()

    def _keep_late(self, parameter: nn.Parameter) -> None:
        """One shard's gradient, or a part of it, which is added to the parts before."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        of_shards = self._late_parts.setdefault(parameter, {})
        before = of_shards.get(self._shard)
        # The copy lies as the parameter's numbers are cut from a bucket.
        of_shards[self._shard] = gradient.clone() if before is None else before + gradient
        self._used.add(id(parameter))

    def _fill_missing(self, bucket: Bucket) -> None:
        self._used |= (bucket.ids - bucket.missing) if bucket.missing else bucket.ids
        bucket.fill_missing()

    def _send(self) -> None:
        bucket = self._layout.buckets[self._next]
        self._fill_missing(bucket)
        self._end_pair(bucket, self._pairs[-1])
        self._next += 1
        run = partial(self._exchange.sum, bucket.stack.parts, "the sum of gradients")
        self._sums.append(run() if self._thread is None else self._thread.submit(run))
