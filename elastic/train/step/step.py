"""One optimizer update is a function of (state, seed, step), whatever the world size.

A loss is a function of sums over the global batch. Each shard is computed by itself: under its own
random stream, from the step's opening buffers, with kernels of one shape. Ranks exchange sums and
nothing else, and each sum is the fixed tree's (reduce/tree.py). So the result does not depend on
which rank computed which shard.

A step scales a loss only with the scaler that it is given; unscaling, clipping and the update are
the recipe's, with plain PyTorch on the gradients in `.grad`.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic.data import random_streams
from elastic.data.loader import Batch
from elastic.data.random_keys import extended
from elastic.errors import ElasticError, UsageError
from elastic.observe.step_line import OWN_NAMES
from elastic.proof.audit import Call, Compute, StepAudit
from elastic.system.silence import Phase
from elastic.train import refuse
from elastic.train.misuse import public
from elastic.train.step.buffers import Contents
from elastic.train.step.contract import Modes, Scaler
from elastic.train.step.parts import Requests, StepOutcome, StepParts, StepPlace
from elastic.train.step.sums import INTEGERS, OpenSums, check_loss, check_summand, described


class Step:
    """A step of the loop. Call `sum` and `backward`, or `mean_loss`; the optimizer; `log`.

    number: from 1. steps: of the whole run. epoch: from 0. global_batch: samples of this step, over
    all ranks. shards: how many slices they are cut into.
    """

    # Without a dict: an attribute that a recipe adds would be lost at a restart.
    __slots__ = (
        *("number", "steps", "epoch", "global_batch", "shards", "logged", "outcome", "averaged"),
        *("fault_point", "has_line", "error", "audit", "_parts", "_load", "_loaded", "_requests"),
        *("_sums", "_buffers_after", "_is_open", "_passes", "_of_shards"),
    )

    def __init__(
        self,
        number: int,
        parts: StepParts,
        load: Callable[[], list[Batch]],
        requests: Callable[[int], Requests],
        audit: Callable[[int, Compute], StepAudit] | None = None,
    ) -> None:
        """load: gives the batches of the own shards, once.

        requests: called with the step's number when gradients are summed. audit: begins that of
        this step, given what runs a call on a batch as in training; None where it has none.
        """
        self.number = number
        self.steps = parts.order.steps
        self.epoch = parts.order.position(number)[0]
        self.global_batch = parts.order.global_batch
        self.shards = parts.order.shards
        self.logged: dict[str, Any] = {}
        self.outcome: StepOutcome | None = None
        self.averaged: list[str] = []  # buffers that became the mean of different values, in step 1
        # Called with the name of each point of the step at which a fault plan can strike.
        self.fault_point: Callable[[str], None] | None = None
        self.has_line = False  # in the metrics: it is too late to log
        self.error: ElasticError | None = None  # the first that a call of the recipe's raised
        self._parts = parts
        self._load = load
        self._loaded: list[Batch] | None = None
        self._requests = requests
        self.audit = None if audit is None else audit(number, self._compute)
        self._sums = OpenSums(number)
        self._buffers_after: dict[int, Contents] = {}
        self._is_open = False  # a pass was made, and its computation has not ended
        self._passes = 0
        parts.contract.begin_step(number)
        # The recipe's draws before its first sum must not depend on what this rank computed before.
        random_streams.seed_all(extended(parts.of_steps, number, 0))
        self._of_shards = extended(parts.of_shards, number)

    def _note_error(self, error: ElasticError, *, is_of_all_ranks: bool) -> None:
        self.error = self.error or error

    def _check_usable(self) -> None:
        """Raises UsageError in a process that the recipe forked, and the error that it caught."""
        refuse.use_in_forked_child()
        if self.error is not None:
            raise self.error

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last step of its epoch, or of the run."""
        return self._parts.order.ends_epoch(self.number)

    @property
    def place(self) -> StepPlace:
        """How far this rank is in the step."""
        return StepPlace(self.number, passes=self._passes, computed=self.outcome is not None)

    @property
    def fraction(self) -> float:
        """How much of the run lies before this step, in [0, 1)."""
        return (self.number - 1) / self.steps

    @public("step.log")
    def log(self, **values: float | str) -> None:
        """Numbers for this step's line in metrics.jsonl; tensors of one element are fine.

        Raises UsageError for a tensor of more, for what JSON cannot hold, for another value of what
        the line has already (`OWN_NAMES` in step_line.py), and once the line is written.
        """
        if self.has_line:
            raise UsageError(
                f"step.log({', '.join(f'{name}=...' for name in values)}): the line of step {self.number} in metrics.jsonl is written already, after the body of the loop; log"
                " in the body, before it ends"
            )
        for name, value in values.items():
            try:
                plain = value.item() if isinstance(value, Tensor | np.generic) else value
                if type(plain) is not float:
                    json.dumps(plain)
            except (RuntimeError, TypeError, ValueError) as error:
                raise UsageError(
                    f"step.log({name}=...): expected one number or a text, found {described(value)} ({error}); log its mean, or each under a name of its own"
                ) from error
            if name in OWN_NAMES and plain != {"step": self.number, "epoch": self.epoch}.get(name):
                raise UsageError(
                    f"step.log({name}=...): expected a name of the recipe's own, found a name of the line's own; take another"
                )
            self.logged[name] = plain

    @public("step.sum", is_of_all_ranks=True)
    def sum(self, function: Callable[[Batch], Tensor]) -> Tensor:
        """The exact sum over all shards of function(batch), called once per own shard.

        function returns a tensor of the same shape and dtype for every shard (float64 is worth its
        price for statistics). The result is the same on every rank: a leaf that requires grad, or
        without a graph where no shard's output has one. The graphs of all own shards are kept until
        `backward`. Whole numbers and truth values become an exact int64 sum, without gradients;
        floats stay what they are, so that float16 becomes inf above 65504, as in plain PyTorch.
        Raises UsageError for other outputs, or where their form differs between shards or steps;
        PeerLost when another rank is gone.
        """
        agreement = None if self._parts.sharded is None else self._parts.agreement
        if agreement is not None:
            agreement.watch_rows()
        outputs = {batch.shard: output for batch, output in self._forward(function, check_summand)}
        if agreement is not None:
            agreement.look_at_rows()
        form = self._parts.forms.check(self._passes, function, outputs)
        dtype = torch.int64 if form.dtype in INTEGERS else form.dtype
        summands = ((shard, output.detach()) for shard, output in outputs.items())
        copies = {shard: each.to(dtype, copy=True).contiguous() for shard, each in summands}
        copies.pop(self.shards, None)
        with self._parts.heartbeat.waiting():
            total = self._parts.exchange.sum_shards(copies, "a sum over shards")
        # What this rank's last shard left there must not reach the recipe's own code.
        self._parts.buffers.load()
        self._sums.add(self._passes, total, outputs, has_graph=form.has_graph)
        self._parts.contract.before_update = self._end_before_update
        if self.audit is not None:
            self.audit.add_sum(self._passes)
        self._parts.heartbeat.enter(Phase.BETWEEN)
        return total

    @public("step.backward", is_of_all_ranks=True)
    def backward(self, loss: Tensor, scaler: Scaler | None = None) -> None:
        """Gradients of a loss that is a function of this step's sums, into `.grad` on every rank.

        loss: scalar, computed alike on every rank. It may also depend on parameters directly, as a
        penalty does. scaler: scales the loss before its gradients are taken.

        By the chain rule the gradient is the sum over shards of (d loss / d sum) · (d f(shard) / d
        p), plus the direct gradient of a penalty. The first factor is the same on every rank, so no
        rank needs another one's graph. Raises UsageError without a sum, PeerLost when another rank
        is gone.
        """
        if not self._sums:
            raise UsageError(
                "expected step.sum(...) before step.backward(loss); for a mean loss use step.mean_loss(...)"
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(
                f"step.backward: expected a scalar with a graph, computed from the tensor of step.sum, found {described(loss)}"
            )
        self._check_usable()
        gradients = self._parts.gradients
        self._parts.buffers.check_body()
        self._parts.contract.check_body()
        self._begin_gradients(scaler)
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        # Those that reach parameters past the sums; d loss / d sum is left in `sum.grad`.
        direct = {p: p.grad for p in gradients.parameters if p.grad is not None}
        if self._parts.sharded is not None:
            self._parts.sharded.check_direct()
        for parameter in direct:
            parameter.grad = None
        for batch in self._batches:
            self._parts.heartbeat.enter(Phase.STEP)
            # Activation checkpointing computes the forward again, from what the buffers are.
            self._parts.buffers.load(self._buffers_after.get(batch.shard))
            self._begin_backward(batch.shard)
            self._sums.backward(self._sums.outputs_of(batch.shard))
            self._end_backward(batch.shard)
        if self.audit is not None:
            self.audit.check(self._sums.backward)
        self._finish(loss.detach(), {})
        # Equal on every rank: added once, after the sum over shards.
        for parameter, gradient in direct.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._parts.contract.end_computation()

    @public("step.mean_loss", is_of_all_ranks=True)
    def mean_loss(self, function: Callable[[Batch], Tensor], scaler: Scaler | None = None) -> float:
        """One call for losses that are means over samples: forward and backward shard by shard.

        function(batch) returns the mean loss of one shard, a scalar. Only one shard's graph is
        alive at a time. Returns the mean over shards; its gradient is in `.grad` afterwards. Shards
        count alike: where they have different numbers of terms (boxes, words, samples that a
        collate leaves out), the exact mean is a ratio of two sums, by `sum` and `backward`. Raises
        UsageError for anything else than a scalar with a graph; PeerLost when another rank is gone.
        """

        def backward(loss: Tensor) -> None:
            scaled = loss if scaler is None else scaler.scale(loss)
            self._sums.is_in_shard = True
            (scaled if self.shards == 1 else scaled / self.shards).backward()  # type: ignore[no-untyped-call]
            self._sums.is_in_shard = False

        self._begin_gradients(scaler)
        losses: dict[int, Tensor] = {}
        for batch, loss in self._forward(function, check_loss):
            self._begin_backward(batch.shard)
            backward(loss)
            self._end_backward(batch.shard)
            # Read at the end of the step, by when another call may have used its memory again.
            losses[batch.shard] = loss.detach().clone() if self.shards > 1 else loss.detach()
        if self.audit is not None:
            self.audit.check(lambda outputs: backward(outputs[-1]), self._passes)
        outcome = self._finish(None, losses)
        self._parts.contract.end_computation()
        return outcome.loss

    def _begin_backward(self, shard: int) -> None:
        if self._parts.sharded is not None:
            self._parts.sharded.begin_round()
        if shard < self.shards:
            self._parts.gradients.before_backward(shard)

    def _end_backward(self, shard: int) -> None:
        """After that of one own shard, whose gradients join the sum."""
        if self.fault_point is not None:
            self.fault_point("backward")
        if self._parts.sharded is not None:
            self._parts.sharded.end_round(self._parts.contract.sharded)
        if shard == self.shards:  # a filler, which only the sharded modules of other ranks need
            for parameter in self._parts.gradients.parameters:
                parameter.grad = None
            return
        self._parts.gradients.after_backward(shard)
        if self.audit is not None and self.audit.own == shard and shard in self._buffers_after:
            self._parts.buffers.check_backward(self._buffers_after[shard])

    def end_by_hand(self) -> StepOutcome:
        """The recipe makes gradients, or the new state, itself, from sums without a graph.

        Called before the first update by an optimizer of the state, or else at the end of the body.
        Raises UsageError where no sum was made, or where one waits for its `backward`.
        """
        if not self._sums.are_by_hand:
            raise UsageError(
                f"step {self.number} ended without gradients: expected step.backward(loss) or step.mean_loss(...) in the loop's body; or "
                "return your own, detached, from the function given to step.sum, and set .grad from the sum"
            )
        norms = self._sums.norms()
        self._parts.buffers.check_body()
        self._parts.gradients.begin_without()
        if self.audit is not None:
            self.audit.check(lambda _outputs: None)
        outcome = self._finish(torch.tensor(math.nan), {})
        self.outcome = replace(outcome, losses=(*outcome.losses, *norms))
        return self.outcome

    def _end_before_update(self, optimizer: Optimizer) -> None:
        if self.outcome is None and self._sums.are_by_hand and self._parts.contract.holds(optimizer):
            self.end_by_hand()

    @property
    def _batches(self) -> list[Batch]:
        """Those of the own shards, loaded when the step first computes something.

        What the recipe's body sets in its dataset before (an epoch, a strength) holds in this step,
        and also in the first one after a restart.
        """
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def abandon(self) -> None:
        """The recipe left the step before its gradients: the buffers are as it found them."""
        if self._passes:
            self._parts.buffers.load()

    def _forward(
        self, function: Callable[[Batch], Tensor], check: Callable[[Any], Tensor]
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Each own shard's output, under its own stream, from its own buffers.

        check: raises UsageError for an output that is not as expected.

        The first pass starts each shard from what the buffers are then; a second one, of another
        sum, starts it from what its own first pass left. Afterwards the step's common stream is
        entered again, so that the recipe's next draws are the same on every rank.
        """
        if not callable(function):
            raise UsageError(
                f"expected a function of a batch in step.mean_loss or step.sum, found {type(function).__name__}; it is called for each "
                "shard, as in step.mean_loss(lambda batch: loss_of(model, batch))"
            )
        self._check_usable()
        self._passes += 1
        contract, buffers, audit = self._parts.contract, self._parts.buffers, self.audit
        contract.begin_pass()
        if self._is_open:
            buffers.check_body()
        else:
            buffers.begin(contract.parts.modules)
        self._is_open = True
        call = Call(function, self._passes, buffers.opening, Modes(contract.parts.modules))
        for batch in self._batches if self._loaded is None else self._loaded:
            shard = batch.shard
            self._parts.heartbeat.enter(Phase.STEP)
            if self.fault_point is not None and shard < self.shards:
                self.fault_point("forward")
            if shard in self._buffers_after:
                call = call._replace(buffers=self._buffers_after[shard])
            is_audited = audit is not None and shard == audit.own
            if is_audited and audit is not None:
                audit.first.begin(call, batch)
            output = self._compute(call, batch)
            if self._parts.sharded is not None:
                self._parts.sharded.check_output(output)
            check(output)
            if buffers.is_any:
                self._buffers_after[shard] = buffers.save()
            if is_audited and audit is not None:
                audit.first.add_call(call.number, output)
            yield batch, output
        contract.end_pass()
        random_streams.seed_all(extended(self._parts.of_steps, self.number, self._passes))

    def _compute(self, call: Call, batch: Batch) -> Tensor:
        """One shard's output, under its own stream, from what the call begins with."""
        random_streams.seed_all(extended(self._of_shards, batch.shard, call.number))
        if self._parts.buffers.is_any:
            self._parts.buffers.load(call.buffers)
        call.modes.load()
        if batch.shard == self.shards:  # a filler's number is nothing for a recipe
            batch = replace(batch, shard=self._parts.exchange.own_shards[0])
        return self._parts.contract.call(call.function, batch)

    def _begin_gradients(self, scaler: Scaler | None) -> None:
        self._parts.contract.begin_computation(scaler)
        shown = () if self.audit is None else (self.audit.own, self.audit.first.add_gradient)
        self._parts.gradients.begin_computation(*shown)
        if self._parts.sharded is not None:
            audited = () if self.audit is None else self.audit.shards
            if self._parts.agreement is not None:
                self._parts.agreement.watch_rows()
            self._parts.sharded.begin_computation(self._parts.exchange, audited, self._parts.contract.sharded)

    def _ask(self, number: int) -> Requests:
        if self.fault_point is not None:
            self.fault_point("mid-sum")
        return self._requests(number)

    def _finish(self, loss: Tensor | None, losses: dict[int, Tensor]) -> StepOutcome:
        """Loss and losses: see StepParts.end."""
        parts, buffers = self._parts, self._buffers_after
        for of_shards in (losses, buffers):
            of_shards.pop(self.shards, None)
        before = self.outcome
        outcome = parts.end(self.number, loss, losses, buffers, self._ask)
        if before is not None:
            own_s = tuple(map(add, before.own_s, outcome.own_s))
            outcome = replace(outcome, losses=(*before.losses, *outcome.losses), own_s=own_s)
        self.outcome = outcome
        if self.number == 1 and buffers:  # a note is printed after the first step
            self.averaged += parts.buffers.averaged(buffers[parts.exchange.own_shards[-1]])
        self._buffers_after, self._is_open = {}, False
        if self._sums:
            self._sums.close()
        parts.heartbeat.enter(Phase.BETWEEN)
        return self.outcome
