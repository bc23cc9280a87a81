"""One optimizer update as the recipe sees it: a loss is a function of sums over the global batch, and every sum is the fixed tree's.

Per shard: its own random stream, the step's opening buffers, kernels of one shape. Across shards: sums, nothing else. So the result is
a function of (state, seed, step) and not of the world size or of which rank computed which shard.
It does not clip, scale or step: the recipe does that with plain PyTorch on the gradients that it finds in `.grad`.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastic.data import random_streams
from elastic.data.loader import Batch
from elastic.errors import UsageError
from elastic.reduce.exchange import Exchange
from elastic.reduce.gradients import Gradients
from elastic.reduce.tree import Block, Stack
from elastic.system.phase import Phase
from elastic.train.buffers import Buffers
from elastic.worker.heartbeat import HeartbeatSender, Unread

Scaler = torch.amp.GradScaler


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What one rank asks of all; rides in the step's sum, so that every rank decides the same at the same step."""

    drain: bool
    keep: bool  # a snapshot
    save: bool  # a checkpoint, of a snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What all ranks know, identically, when a step's sums are done."""

    loss: float
    gradient_norms: tuple[float, ...]  # of each bucket
    drain: bool
    keep: bool
    save: bool


class Shards:
    """What steps share: this rank's shards, their data, and the sums across ranks."""

    def __init__(
        self,
        *,
        exchange: Exchange,
        gradients: Gradients,
        buffers: Buffers,
        device: torch.device,
        seed: int,
        pulse: HeartbeatSender | None = None,
    ) -> None:
        self.exchange = exchange
        self.gradients = gradients
        self.buffers = buffers
        self.device = device
        self.seed = seed
        self.pulse = HeartbeatSender(Unread(), 0) if pulse is None else pulse

    def sum(self, of_leaf: dict[int, Tensor], what: str) -> Tensor:
        """Tree sum of equally shaped tensors, one per own shard; they are overwritten."""
        stack: Stack[Tensor] = Stack(Tensor.add_)
        for leaf, value in of_leaf.items():
            stack.push(Block(leaf, 1), value.reshape(-1))
        shape = next(iter(of_leaf.values())).shape
        with self.pulse.waiting():
            total = self.exchange.sum(stack.parts, what)
            if self.exchange.world_size > 1 and total.device.type == "cuda":
                # nccl only queues the sum: without this the host would wait for other ranks in the middle of the recipe's code.
                torch.cuda.current_stream(total.device).synchronize()
        return total.view(shape)


class Step:
    """A step of the loop. Call `sum` and `backward`, or `mean_loss`; then the optimizer; then `log`."""

    def __init__(  # noqa: PLR0913 - the loop alone makes one
        self,
        *,
        number: int,
        steps: int,
        epoch: int,
        shards: Shards,
        batches: list[Batch],
        requests: Callable[[], Requests],
        global_batch: int,
    ) -> None:
        self.number = number
        self.steps = steps
        self.epoch = epoch
        self.global_batch = global_batch
        self.logged: dict[str, Any] = {}
        self.outcome: StepOutcome | None = None
        self.reached: Callable[[str], None] = lambda _point: None
        self._shards = shards
        self._batches = batches
        self._requests = requests
        self._sums: list[tuple[Tensor, dict[int, Tensor]]] = []
        self._after: dict[int, list[Tensor]] = {}
        self._passes = 0
        shards.buffers.open()
        # What the recipe draws before its first sum must not depend on what loading this rank's shards has drawn.
        random_streams.enter(shards.seed, "step", number, 0)

    @property
    def fraction(self) -> float:
        """How much of the run lies before this step, in [0, 1)."""
        return (self.number - 1) / self.steps

    def log(self, **values: float | str) -> None:
        """Numbers for this step's line in metrics.jsonl; tensors of one element are fine."""
        for name, value in values.items():
            self.logged[name] = value.item() if isinstance(value, Tensor) else value

    def sum(self, function: Callable[[Batch], Tensor]) -> Tensor:
        """The exact sum over all shards of function(batch), called once per own shard.

        function returns a tensor of the same shape and floating dtype for every shard (float64 is worth its price for statistics);
        the result is a leaf that requires grad, the same on every rank. The graphs of all own shards are kept until `backward`.
        Raises PeerLost when another rank is gone.
        """
        outputs = {batch.shard: output for batch, output in self._forward(function)}
        total = self._shards.sum(
            {leaf: out.detach().clone() for leaf, out in outputs.items()}, "a sum over shards"
        )
        total.requires_grad_(True)
        self._sums.append((total, outputs))
        return total

    def backward(self, loss: Tensor, scaler: Scaler | None = None) -> None:
        """Gradients of a loss that is a function of this step's sums, exactly summed over all shards, into `.grad` on every rank.

        loss: scalar, computed alike on every rank. The loss may also depend on parameters directly (a penalty, say).
        """
        if not self._sums:
            raise UsageError(
                "expected step.sum(...) before step.backward(loss); for a mean loss use step.mean_loss(...)"
            )
        gradients = self._shards.gradients
        direct = self._direct_gradients(loss if scaler is None else scaler.scale(loss))
        gradients.begin()
        for batch in self._batches:
            self._shards.pulse.enter(Phase.STEP)
            outputs = [
                (out[batch.shard], total.grad) for total, out in self._sums if out[batch.shard].requires_grad
            ]
            gradients.before(batch.shard)
            if outputs:  # a sum for the metrics alone may have no graph
                torch.autograd.backward([out for out, _ in outputs], [gradient for _, gradient in outputs])
            self.reached("backward")
            gradients.after(batch.shard)
        with self._shards.pulse.waiting():  # nccl: sums that are on their way may stand before it
            known = float(loss.detach())
        self._finish(known, dict.fromkeys(self._own, 0.0))
        for parameter, gradient in direct.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._sums = []

    def mean_loss(self, function: Callable[[Batch], Tensor], scaler: Scaler | None = None) -> float:
        """One call for losses that are means over samples: forward and backward shard by shard, one graph alive at a time.

        function(batch) returns the mean loss of one shard, a scalar. The gradient of the global mean is in `.grad` afterwards;
        returns the global mean.
        """
        gradients = self._shards.gradients
        for parameter in gradients.parameters:
            parameter.grad = None
        gradients.begin()
        losses: dict[int, float] = {}
        for batch, loss in self._forward(function):
            gradients.before(batch.shard)
            scaled = loss if scaler is None else scaler.scale(loss)
            (scaled / self._shards.exchange.shards).backward()  # type: ignore[no-untyped-call]
            self.reached("backward")
            gradients.after(batch.shard)
            # After the last shard the sums are on their way, and with nccl the host stands behind them here.
            is_last = batch.shard == self._own[-1]
            with self._shards.pulse.waiting() if is_last else nullcontext():
                losses[batch.shard] = float(loss.detach())
        self._finish(None, losses)
        assert self.outcome is not None
        return self.outcome.loss

    @property
    def _own(self) -> list[int]:
        return [batch.shard for batch in self._batches]

    def _forward(self, function: Callable[[Batch], Tensor]) -> Iterator[tuple[Batch, Tensor]]:
        """Each own shard's output, under its own stream, from its own buffers; afterwards the step's common stream again."""
        self._passes += 1
        seed, buffers = self._shards.seed, self._shards.buffers
        for batch in self._batches:
            self._shards.pulse.enter(Phase.STEP)
            random_streams.enter(seed, "shard", self.number, batch.shard, self._passes)
            buffers.load(self._after.get(batch.shard))
            self.reached("forward")
            output = function(batch)
            self._after[batch.shard] = buffers.save()
            yield batch, output
        random_streams.enter(seed, "step", self.number, self._passes)

    def _direct_gradients(self, loss: Tensor) -> dict[torch.nn.Parameter, Tensor]:
        for parameter in self._shards.gradients.parameters:
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        found = {p: p.grad for p in self._shards.gradients.parameters if p.grad is not None}
        for total, _ in self._sums:
            if total.grad is None:
                total.grad = torch.zeros_like(total)
        return found

    def _finish(self, loss: float | None, losses: dict[int, float]) -> None:
        """The step's second sum: the loss, who asks for what, which gradients exist, and the buffers."""
        shards, buffers = self._shards, self._shards.buffers
        with shards.pulse.waiting():
            flats = shards.gradients.wait()
        self.reached("mid-sum")
        asked = self._requests()
        mine = torch.tensor([asked.drain, asked.keep, asked.save], dtype=torch.float64)
        mine = torch.cat([mine, shards.gradients.used()]).to(shards.device)
        contributions = {}
        for place, leaf in enumerate(self._own):
            # A rank's own word counts once, whatever the number of its shards.
            head = torch.cat(
                [torch.tensor([losses[leaf]], dtype=torch.float64, device=shards.device), mine * (place == 0)]
            )
            contributions[leaf] = torch.cat([head, buffers.contribution(self._after[leaf], leaf)])
        total = shards.sum(contributions, "the end of a step")
        known, used, changed = torch.split(total, [4, mine.numel() - 3, buffers.length])
        mean, drain, keep, save = known.tolist()
        shards.gradients.place(flats, used)
        buffers.close(changed)
        self.outcome = StepOutcome(
            loss=loss if loss is not None else mean / shards.exchange.shards,
            gradient_norms=tuple(float(torch.linalg.vector_norm(flat)) for flat in flats),
            drain=drain > 0,
            keep=keep > 0,
            save=save > 0,
        )
        shards.pulse.enter(Phase.BETWEEN)
