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
undisturbed one sums. In the first computation of a set of parameters hooks watch them: whether
gradients come at once or in parts, as reentrant activation checkpointing may give them. Then no
two shards share `.grad`, and no bucket goes early.

A parameter that no shard on any rank used keeps `.grad = None`, as in plain PyTorch. A zero instead
would let weight decay and momentum change it. Parameters that no optimizer holds may be those of a
copy that never has a gradient, which would double the exchange. So with several workers one of them
gets a place in a bucket once a backward has reached it on any rank.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from elastic.reduce.bucket import Bucket, Show, Trained, add, changed, groups
from elastic.reduce.exchange import Exchange
from elastic.reduce.tree import fold, pairs

# So many layouts are kept, the newest ones: the networks of a GAN take turns.
MOST_LAYOUTS = 3
_DTYPE = attrgetter("dtype")
_HOLD_NUMBERS = torch.float32, torch.float64


class Layout:
    """A set of parameters that is summed in one computation, cut into buckets.

    buckets: those whose gradients are summed over ranks, or all that are trained with one worker.
    every: these, and one of others that no backward is known to reach. is_in_parts: whether a shard
    gave a gradient in parts; None until a computation has shown it.
    """

    def __init__(self, buckets: list[Bucket], late: Bucket | None = None) -> None:
        self.buckets, self.late = buckets, late
        self.every = buckets if late is None else [*buckets, late]
        self.parameters = [p for bucket in self.every for p in bucket.parameters]
        self.is_in_parts: bool | None = None
        self.hooks: list[RemovableHandle] = []

    def unhook(self) -> None:
        for hook in self.hooks:
            hook.remove()


class Gradients:
    """The gradients of the parameters that are trained, from one training step to the next.

    Call, in each computation: `begin_computation`; around each own shard's backward
    `before_backward` and `after_backward`, shards in order; `sum`, where there are several ranks;
    `assign`.
    """

    def __init__(self, trained: Trained, exchange: Exchange) -> None:
        self._trained = trained
        self._exchange = exchange
        self._pair_of: dict[int, tuple[int, ...]] = {}
        self._paired: object = None  # of what that was made
        self._shown: tuple[int, ...] = ()  # a shard by itself, whose gradients are given to `_show`
        self._show: Show | None = None
        self._layouts: OrderedDict[object, Layout] = OrderedDict()
        self._layout = Layout([])
        # Of what it was made: lists that never change, and forms of the parameters.
        self._made_of: tuple[list[nn.Parameter], list[nn.Parameter], list[Any]] = [], [], []
        self._joined: dict[nn.Parameter, None] = {}  # others that a backward has reached
        self._is_last = False  # inside the backward of the last own shard, which sends buckets
        self._sums: list[Future[Tensor] | Tensor] = []
        # One thread: collectives must start in the same order on every rank.
        self._thread = ThreadPoolExecutor(1, "exchange") if exchange.world_size > 1 else None
        # In the first computation of a layout, each time a parameter got a gradient in this shard.
        self._seen: list[nn.Parameter] = []
        self._watched: dict[nn.Parameter, RemovableHandle] = {}
        self._watch(trained.required)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of the computation that was begun last, which require a gradient."""
        return self._layout.parameters

    def begin_computation(self, shown: int | None = None, show: Show | None = None) -> None:
        """Before the first backward of a computation: no parameter has a gradient any more.

        shown: an own shard whose gradients `show` is given. They are added to those of its partner
        as tensors, and not in place by autograd, which is the same addition.
        """
        self._layout = layout = self._current_layout()
        self._shown, self._show = () if shown is None else (shown,), show
        shards = self._exchange.own_shards, shown, self._exchange.is_reversed, layout.is_in_parts
        if shards != self._paired:
            self._paired = shards
            self._pair(pairs(self._exchange.own_shards, shown))
        for bucket in layout.every:
            bucket.begin()
        self._sums = []
        if layout.is_in_parts is None:
            self._watch(layout.parameters)

    def begin_without(self) -> None:
        """A computation without gradients, which leaves `.grad` alone."""
        self._layout, self._made_of, self._sums = Layout([]), ([], [], []), []

    def before_backward(self, shard: int) -> None:
        """Before the backward of one own shard; shards come in order, or all in reverse.

        Raises UsageError where the function has changed gradients.
        """
        is_second = shard != self._pair_of[shard][0]
        for bucket in self._layout.every:
            bucket.begin_shard(is_second=is_second)
        self._seen.clear()
        self._is_last = shard == next(reversed(self._pair_of))

    def after_backward(self, shard: int) -> None:
        """After the backward of one own shard; the last one sends the buckets that still wait.

        A bucket still waits when it, or one before it, has a parameter that the last shard did not
        use. Raises UsageError where something else than autograd has written a gradient.
        """
        is_last, self._is_last = self._is_last, False
        layout, num_sent = self._layout, len(self._sums)
        if self._watched:
            self._look_for_parts()
        for bucket in layout.buckets[:num_sent]:
            bucket.check_sent()
        pair = self._pair_of[shard]
        for bucket in layout.every[num_sent:]:
            if shard == pair[-1]:
                self._end_block(bucket, pair)
            else:
                bucket.end_first()
        while is_last and self._thread is not None and len(self._sums) < len(layout.buckets) - 1:
            self._send()

    def used(self) -> list[float]:
        """[parameters]: 1 where this rank's shards gave a gradient, else 0."""
        return [float(each) for bucket in self._layout.every for each in bucket.used]

    def wait(self) -> None:
        """For the sums that are under way. Raises PeerLost when another rank is gone."""
        self._sums = [each if isinstance(each, Tensor) else each.result() for each in self._sums]

    def sum(self, numbers: Tensor) -> Tensor:
        """End the sums over ranks: of gradients, and of the numbers of a step beside them.

        numbers: float32 [n]; each is 0 on all ranks but one, or whole and small, so that its sum is
        exact. They ride in the last bucket if its dtype holds them. Raises PeerLost when another
        rank is gone.
        """
        buckets, blocks = self._layout.buckets, self._exchange.own_blocks
        last = buckets[-1] if buckets and buckets[-1].forms[0][0] in _HOLD_NUMBERS else None
        if buckets and last is None:
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
        layout, counts = self._layout, iter(used)
        if self._thread is None:
            for bucket in layout.every:
                given = fold(bucket.stack.parts, self._exchange.shards, add)
                bucket.check_forms(given)
                bucket.assign(given)
        else:
            for bucket, flat in zip(layout.buckets, self._sums, strict=True):
                assert isinstance(flat, Tensor)
                bucket.assign([view if next(counts) else None for view in bucket.views(flat)])
            if layout.late is not None:
                self._add_late([next(counts) > 0 for _ in layout.late.parameters])
        if self._watched:
            layout.is_in_parts = bool(layout.is_in_parts)
            self._unwatch()

    def close(self) -> None:
        """Remove the hooks: a recipe may use these parameters for something else after the run."""
        self._unwatch()
        for layout in self._layouts.values():
            layout.unhook()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _add_late(self, is_reached: list[bool]) -> None:
        """Sum the gradients of parameters that were reached for the first time."""
        late = self._layout.late
        assert late is not None
        for bucket in late.parts(is_reached):
            flat = self._exchange.sum(bucket.pack(), "gradients that came for the first time")
            bucket.assign(list(bucket.views(flat)))
            self._joined.update(dict.fromkeys(bucket.parameters))
            self._made_of = [], [], []

    def _pair(self, found: tuple[tuple[int, ...], ...]) -> None:
        """Which own shards share `.grad`, in the order in which they are computed."""
        if self._layout.is_in_parts:
            found = tuple((shard,) for pair in found for shard in pair)
        if self._exchange.is_reversed:
            found = tuple(pair[::-1] for pair in found[::-1])
        self._pair_of = {shard: pair for pair in found for shard in pair}

    def _current_layout(self) -> Layout:
        """That of the parameters which are trained now."""
        trained, others = self._trained.required, self._trained.others
        forms = [*map(_DTYPE, trained), *map(Tensor.stride, trained)]
        if self._made_of[0] is trained and self._made_of[1] is others and self._made_of[2] == forms:
            return self._layout
        self._made_of = trained, others, forms
        joined = [p for p in others if p in self._joined]
        # A layout refers to its parameters, so that no other one can get the id of one of them.
        name = *(tuple(map(id, each)) for each in (trained, joined, others)), *forms
        if name not in self._layouts:
            self._layouts[name] = self._new_layout(
                trained, joined, [p for p in others if p not in self._joined]
            )
        self._layouts.move_to_end(name)
        if len(self._layouts) > MOST_LAYOUTS:
            self._layouts.popitem(last=False)[1].unhook()
        return self._layouts[name]

    def _new_layout(
        self, trained: list[nn.Parameter], joined: list[nn.Parameter], late: list[nn.Parameter]
    ) -> Layout:
        cut = [trained[::-1]] if self._thread is None else [*groups(trained), *groups(joined)]
        layout = Layout(
            [Bucket(group, self._trained) for group in cut], Bucket(late, self._trained) if late else None
        )
        for bucket in layout.buckets[:-1]:
            # The parameter that backward reaches last, if it reaches them in their order.
            hook = bucket.parameters[-1].register_post_accumulate_grad_hook(partial(self._reached, layout))  # type: ignore[no-untyped-call]
            layout.hooks.append(hook)
        return layout

    def _reached(self, layout: Layout, _parameter: nn.Parameter) -> None:
        """Send the buckets that are complete, in their order: one that is complete early waits."""
        if not self._is_last or layout is not self._layout or layout.is_in_parts is not False:
            return
        last = next(reversed(self._pair_of.values()))
        while (number := len(self._sums)) < len(layout.buckets) - 1 and layout.buckets[number].is_complete:
            self._end_block(layout.buckets[number], last)
            self._send()

    def _end_block(self, bucket: Bucket, pair: tuple[int, ...]) -> None:
        bucket.end_block((min(pair), len(pair)), self._show if pair == self._shown else None)

    def _send(self) -> None:
        assert self._thread is not None
        vectors = self._layout.buckets[len(self._sums)].pack()
        self._sums.append(self._thread.submit(self._exchange.sum, vectors, "the sum of gradients"))

    # In the first computation of a layout.

    def _watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """One hook for each parameter that requires a gradient; torch has none for others."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._watched:
                hook = parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                self._watched[parameter] = hook

    def _unwatch(self) -> None:
        for hook in self._watched.values():
            hook.remove()
        self._watched = {}

    def _accumulated(self, parameter: nn.Parameter) -> None:
        self._trained.check_backward(parameter)
        self._seen.append(parameter)

    def _look_for_parts(self) -> None:
        """After a shard's backward. Raises UsageError where a gradient was taken away."""
        counts = Counter(map(id, self._seen))
        for parameter in self._seen:
            if parameter.grad is None:
                raise changed(self._trained.name_of(parameter), parameter)
        if not self._layout.is_in_parts and any(count > 1 for count in counts.values()):
            self._layout.is_in_parts = True
            self._pair(tuple(dict.fromkeys(self._pair_of.values())))
