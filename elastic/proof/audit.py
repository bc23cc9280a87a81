"""In an audited step one shard of each rank is computed a second time, and must give the same bits.

Any rank can compute any shard: its data, random streams and opening buffers are functions of
(seed, step, shard), and the parameters are the same everywhere. So each rank also computes one
shard of the next rank, all of them at once; a world of one repeats a shard of its own. Compared are
the data, what the function returned, the buffers after it, and each parameter's gradient as it
joined the sum. This finds what a comparison of states cannot: a result that all ranks share and
that another world size would not have given.

It happens before the sums are assigned, so before the parameters are updated, and leaves random
streams, buffers, modes and `.grad` as they were. What the function leaves elsewhere, such as a
count in an attribute, stays as the second computation leaves it. It does not look at sums that no
backward follows, nor at the optimizer. A third computation tells a machine from a recipe; in it,
functions of earlier sums of the step see the loop's variables as they are by then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from elastic.data import random_streams
from elastic.data.fingerprint import fingerprint
from elastic.data.loader import Batch
from elastic.divergence import Divergence, may_come_as_late
from elastic.errors import MachineFault, RecipeNotExact
from elastic.proof.evidence import Evidence
from elastic.proof.verdict import DATA, GRADIENT, Audited, audited_shard, auditor_of
from elastic.system.silence import Phase
from elastic.train.loop.build import LoopParts
from elastic.train.state import structure
from elastic.train.state.flat import tensor_checksum
from elastic.train.state.state import State
from elastic.train.step.buffers import Contents
from elastic.train.step.contract import Modes
from elastic.train.step.parts import StepParts

Backward = Callable[[list[Tensor]], None]  # from the outputs of one shard's calls, in their order


class Call(NamedTuple):
    """One call of the recipe's function for one shard.

    number: among the sums and losses of the step, from 1. buffers, modes: that it begins with.
    """

    function: Callable[[Batch], Tensor]
    number: int
    buffers: Contents
    modes: Modes


Compute = Callable[[Call, Batch], Tensor]


@dataclass(frozen=True, slots=True)
class Auditor:
    """What the audits of one rank in one generation share.

    compare: compares the states of all ranks as they were before the step, and raises if they
    differ. began: the step with whose state the generation began.
    """

    parts: LoopParts
    of_steps: StepParts
    compare: Callable[[], None]
    began: int = 0

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Afterwards the State, its gradients and the random streams are as before; sharded modules
        hold their own rows.
        """
        buffers, gradients = self.of_steps.buffers.save(), [(p, p.grad) for p in self.names]
        modes = Modes(structure.submodules(self.parts.state.modules))
        with random_streams.kept():
            try:
                yield
            finally:
                if self.parts.state.sharded is not None:
                    self.parts.state.sharded.reshard()
                modes.load()
                self.of_steps.buffers.load(buffers)
                for parameter, gradient in gradients:
                    parameter.grad = gradient

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """All that a backward may give a gradient, with their names."""
        trained = {each: f"parameter {place}" for place, each in enumerate(self.parts.state.trained)}
        return trained | {
            parameter: f"{name}.{path}"
            for name, module in self.parts.state.named_modules()
            for path, parameter in module._parameters.items()  # noqa: SLF001
            if parameter is not None
        }


class Computation:
    """One computation of one shard in one step, and what it took and gave."""

    def __init__(self, shard: int, state: State) -> None:
        self.shard = shard
        self._state = state
        self.begun: dict[int, tuple[Call, int]] = {}  # by number: a call, and its batch's `drawn`
        self.buffers: Contents | None = None  # what the last call left
        self.gradients: dict[nn.Parameter, str] = {}
        self._data = ""
        self.sharded: dict[str, int] = {}  # checksums of sharded gradients, by module
        self._outputs: dict[int, str] = {}
        self._left: dict[str, str] = {}  # of `buffers`, those that are part of the State

    def begin(self, call: Call, batch: Batch) -> None:
        if not self.begun:  # later calls have the same data, perhaps changed by the first
            self._data = fingerprint(batch.data)
        self.begun[call.number] = call, batch.drawn

    def add_call(self, number: int, output: Tensor) -> None:
        """It has ended; the modules have the buffers that it left."""
        self._outputs[number] = tensor_checksum(output)
        self._left = {
            f"the buffer {name}.{path}": tensor_checksum(buffer)
            for name, module in self._state.named_modules()
            for path, buffer in module._buffers.items()  # noqa: SLF001
            # Others may be caches, whose size depends on the past.
            if buffer is not None and path not in module._non_persistent_buffers_set  # noqa: SLF001
        }

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.gradients[parameter] = tensor_checksum(gradient)

    def evidence(self, calls: list[int], names: dict[nn.Parameter, str]) -> Evidence:
        """Of all that is known of these calls, and of the gradients after them."""
        outputs = {f"what call {number} of the step returned": self._outputs[number] for number in calls}
        gradients = {f"{GRADIENT}{names[each]}": value for each, value in self.gradients.items()}
        sharded = {f"{GRADIENT}{name}": str(value) for name, value in self.sharded.items()}
        return Evidence({DATA: self._data, **outputs, **self._left, **gradients, **sharded})


class StepAudit:
    """The audit of one step on one rank.

    shards: of each rank the one that is computed again elsewhere; own: this rank's. first: the
    computation of that in training, which adds its calls and gradients. again: that of another one
    here.
    """

    def __init__(self, auditor: Auditor, step: int, compute: Compute) -> None:
        """compute: runs a call on a batch, as in training."""
        self._auditor = auditor
        self._step = step
        self._compute = compute
        seed, rank = auditor.parts.loader.order.seed, auditor.parts.groups.rank
        spans = auditor.of_steps.exchange.spans
        self.shards = [audited_shard(seed, step, each) for each in spans]
        self.own, self._owner = self.shards[rank], (rank + 1) % len(spans)
        state = auditor.parts.state
        self.first, self.again = (Computation(each, state) for each in (self.own, self.shards[self._owner]))
        self._batch: Batch | None = None  # of the shard that is computed again here
        self._outputs: dict[int, Tensor] = {}  # its graphs since the last comparison, by number of the call

    def add_sum(self, number: int) -> None:
        """Compute the other shard's part of a sum, whose backward comes later."""
        with self._auditor.undisturbed():
            self._call_again(number)

    def check(self, backward: Backward, loss: int | None = None) -> None:
        """Compare the calls since the last comparison, and the gradients.

        loss: the number of a last call, whose backward follows at once. Raises MachineFault,
        RecipeNotExact, PeerLost.
        """
        with self._auditor.undisturbed():
            if loss is not None:
                self._call_again(loss)
            self._differentiate(self.again, list(self._outputs.values()), backward)
            self._compare(list(self._outputs), backward)
        self._outputs = {}
        self.again.buffers = None  # the next computation begins with the mean over shards
        for each in (self.first, self.again):
            each.gradients.clear()

    def _call_again(self, number: int) -> None:
        if self._batch is None:
            self._batch = self._auditor.parts.loader.shard(self._step, self.again.shard)
        before = self.again.buffers or self._auditor.of_steps.buffers.opening
        call = self.first.begun[number][0]._replace(buffers=before)
        self._outputs[number] = self._run(self.again, call, self._batch)

    def _run(self, computation: Computation, call: Call, batch: Batch) -> Tensor:
        self._auditor.of_steps.heartbeat.enter(Phase.STEP)
        computation.begin(call, batch)
        output = self._compute(call, batch)
        computation.buffers = self._auditor.of_steps.buffers.save()
        computation.add_call(call.number, output)
        return output

    def _differentiate(self, computation: Computation, outputs: list[Tensor], backward: Backward) -> None:
        for parameter in self._auditor.names:
            parameter.grad = None
        self._auditor.of_steps.heartbeat.enter(Phase.STEP)
        # Activation checkpointing runs the forward again, and needs the buffers that it left.
        self._auditor.of_steps.buffers.load(computation.buffers)
        sharded = self._auditor.parts.state.sharded
        if sharded is None:
            backward(outputs)
        else:
            own, neighbours = self.shards, [*self.shards[1:], self.shards[0]]
            now = own if computation.shard == self.own else neighbours
            found = sharded.again(now, partial(backward, outputs))
            computation.sharded = found.get(computation.shard, {})
        for parameter in self.first.gradients:
            # A gradient that a shard does not give counts as +0.0 in the sum.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            computation.add_gradient(parameter, gradient)

    def _compare(self, calls: list[int], backward: Backward) -> None:
        groups = self._auditor.parts.groups
        computations, names = (self.first, self.again), self._auditor.names
        with self._auditor.of_steps.heartbeat.waiting():
            # The sums of gradients are under way, perhaps in the same process group, and every rank
            # must start the operations of a group in the same order.
            self._auditor.of_steps.gradients.wait()
        if (sharded := self._auditor.parts.state.sharded) is not None:
            self.first.sharded = sharded.audited().get(self.own, {})
        told = groups.all_gather([each.evidence(calls, names).whole for each in computations])
        ranks = len(told)
        if failed := [each for each in range(ranks) if told[each][0] != told[auditor_of(each, ranks)][1]]:
            self._fail(failed, calls, backward)

    def _fail(self, failed: list[int], calls: list[int], backward: Backward) -> None:
        """Compute the shards of these ranks once more, judge, and raise the same on every rank."""
        # States that differ since an earlier step make results differ that are each right.
        self._auditor.compare()
        groups, names = self._auditor.parts.groups, self._auditor.names
        found: list[Computation | None] = [None] * 4
        is_of_all = self._auditor.parts.state.sharded is not None  # a sharded forward is
        if groups.rank in failed or is_of_all:
            found[0], found[2] = self.first, self._repeat(self.first, calls, backward)
        if self._owner in failed or is_of_all:
            found[1], found[3] = self.again, self._repeat(self.again, calls, backward)
        evidence = [{} if each is None else each.evidence(calls, names).entries for each in found]
        nodes = groups.all_gather(self._auditor.parts.link.node)
        told = [list(map(Evidence, each)) for each in groups.all_gather(evidence)]
        came_before = any(groups.all_gather(self._came_before()))
        audited = [
            Audited(
                step=self._step,
                shard=self.shards[owner],
                owner=owner,
                auditor=auditor,
                nodes=(nodes[owner], nodes[auditor]),
                first=told[owner][0],
                again=told[auditor][1],
                owners_second=told[owner][2],
                auditors_second=told[auditor][3],
                came_before=came_before,
                has_copies=self._auditor.parts.loader.workers > 0,
            )
            for owner in failed
            for auditor in [auditor_of(owner, len(nodes))]
        ]
        if (output := self._auditor.parts.output) is not None:
            for each in audited:
                output.log.record(each.event)
        groups.all_gather(None)  # recorded: only now may a rank end, whose agent kills the others
        # Of several failures a recipe's comes first: it would only come back.
        worst = min(audited, key=lambda each: each.node is not None)
        if worst.node is None:
            raise RecipeNotExact(worst.sentence())
        divergence = Divergence(
            generation=self._auditor.parts.link.generation,
            step=self._step,
            agreed=self._step - 1,
            entry=worst.different[0],
            at_fault=(worst.node,),
            began=self._auditor.began,
        )
        raise MachineFault(worst.sentence(), divergence)

    def _came_before(self) -> bool:
        """In this step, which is done again, or as many steps after the beginning."""
        ended_by, began = self._auditor.parts.link.divergence, self._auditor.began
        is_same = ended_by is not None and ended_by.step == self._step
        return is_same or may_come_as_late(ended_by, began=began, agreed=self._step - 1, step=self._step)

    def _repeat(self, computation: Computation, calls: list[int], backward: Backward) -> Computation:
        """The same computation again, from its data on."""
        again, outputs = Computation(computation.shard, self._auditor.parts.state), []
        batch = self._auditor.parts.loader.shard(self._step, again.shard)
        for number in calls:
            call, batch.drawn = computation.begun[number]
            outputs.append(self._run(again, call, batch))
        self._differentiate(again, outputs, backward)
        return again
