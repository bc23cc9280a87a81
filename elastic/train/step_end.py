"""The end of a step is one all-reduce of one vector, after which all ranks know the same.

It carries losses, requests, votes on the state before the step, how long each rank worked, which
gradients exist, and buffers.
Then each rank has the step's gradients in `.grad` and the step's buffers in its modules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from elastic.errors import UsageError
from elastic.train.modes import StepModes, are_equal
from elastic.train.opening_buffers import Contents
from elastic.train.step_parts import Requests, StepOutcome, StepParts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """What one rank brings to the end of step `number`.

    buffers: what they are after each own shard. modes: those that each own shard left. requests:
    called with the step's number once the gradients are summed. fault_point: see Step.
    """

    parts: StepParts
    number: int
    buffers: dict[int, Contents]
    modes: StepModes
    requests: Callable[[int], Requests]
    fault_point: Callable[[str], None]

    def exchange(self, loss: Tensor | None, losses: dict[int, Tensor]) -> StepOutcome:
        """loss: known to every rank already, or None where it is the mean of `losses`.

        losses: of the own shards, none where `loss` is known. The host waits for the device once,
        where it reads all numbers. Raises UsageError for integers in buffers, and for modes, that
        differ between shards, PeerLost when another rank is gone, and what a vote on the states
        raises.
        """
        parts = self.parts
        with parts.heartbeat.waiting():
            flats = parts.gradients.wait()
        self.fault_point("mid-sum")
        asks = self.requests(self.number)
        votes = [] if parts.agreement is None else parts.agreement.numbers()
        said = [*asks, *votes, *parts.pace.numbers()]
        contributions = self._contributions(said, losses)
        with parts.heartbeat.waiting():
            total = parts.exchange.sum_shards(contributions, "the end of a step")
        of_ranks = total.numel() - parts.buffers.length
        buffers = total[of_ranks:]
        # Of those that optimizers hold: the others come to buckets by what this process has seen.
        norms = [torch.linalg.vector_norm(flat) for flat in flats[: parts.gradients.trained_buckets]]
        if loss is None:
            loss = total[0] / parts.exchange.shards
        with parts.heartbeat.waiting():
            found, (known_loss,), signs, *of_norms = self._read(
                total[:of_ranks], loss, parts.buffers.signs(buffers), *norms
            )
        _, hashes, squares, *numbers = found
        sums, used = numbers[: len(said)], numbers[len(said) :]
        own_s = parts.pace.read(sums[len(asks) + len(votes) :])
        asked, votes = sums[: len(asks)], sums[len(asks) : len(asks) + len(votes)]
        if parts.agreement is not None:
            parts.agreement.read(votes, undo=parts.buffers.load)
        if not are_equal((hashes, squares), parts.exchange.shards):
            self._refuse_modes()
        parts.gradients.assign(flats, used)
        with parts.heartbeat.waiting():
            parts.gradients.add_late(used)
        if parts.buffers.found_changes(signs):
            late = parts.buffers.contributions(self.buffers)
            with parts.heartbeat.waiting():
                buffers = parts.exchange.sum_shards(late, "buffers that forward changed for the first time")
                (signs,) = self._read(parts.buffers.signs(buffers))
        self._check_integers(signs)
        parts.buffers.end(buffers, signs)
        return StepOutcome(
            loss=known_loss,
            gradient_norms=tuple(norm for (norm,) in of_norms),
            requests=Requests(*(count > 0 for count in asked)),
            own_s=own_s,
        )

    def _contributions(self, said: list[float], losses: dict[int, Tensor]) -> dict[int, Tensor]:
        """The vector of each own shard, float64.

        It is [1] its loss, [2] a number for the modes that it left and its square, [5] the fields
        of Requests, [2 · ranks] votes on the state before this step and [ranks] seconds that each
        of them worked (none with one rank), [parameters] whether a gradient exists,
        [buffers.length] its buffers. What is said by ranks and not by shards is in a rank's first
        shard alone.
        """
        parts = self.parts
        of_rank = [*said, *parts.gradients.used()]
        nothing = [0.0] * len(of_rank)
        buffers, modes = parts.buffers.contributions(self.buffers), self.modes.numbers()
        # A rank's requests count once, whatever the number of its shards.
        rows = [
            [0.0, *modes[shard], *(nothing if index else of_rank)]
            for index, shard in enumerate(parts.exchange.own_shards)
        ]
        heads = torch.tensor(rows, dtype=torch.float64).to(parts.device)
        if losses:
            heads[:, 0] = torch.stack([losses[shard].view(()) for shard in parts.exchange.own_shards])
        if parts.buffers.length:
            heads = torch.cat(
                [heads, torch.stack([buffers[shard] for shard in parts.exchange.own_shards])], 1
            )
        return dict(zip(parts.exchange.own_shards, heads.unbind(), strict=True))

    def _read(self, *tensors: Tensor) -> list[list[float]]:
        """The numbers of each, in one wait for the device."""
        flat = [each.reshape(-1).to(self.parts.device, torch.float64) for each in tensors]
        numbers = iter(torch.cat(flat).tolist())
        return [list(islice(numbers, each.numel())) for each in tensors]

    def _refuse_modes(self) -> None:
        """Raises UsageError, on every rank."""
        parts, shards = self.parts, self.parts.exchange.shards
        name = "a module"
        if are_equal(self._sum(self.modes.sizes()), shards):
            totals = self._sum(self.modes.flags())
            found = [
                each for each, count in zip(self.modes.modules, totals, strict=True) if 0 < count < shards
            ]
            name = parts.contract.name_of_module(found[0]) if found else name
        raise UsageError(
            f"step {self.number}: expected the function that step.mean_loss or step.sum is given to leave modules in the same modes after every shard, found {name} in "
            "evaluation mode after some shards and in training mode after others. The loop would go on in the modes of the last shard of each worker, and the result "
            "would depend on how many workers there are: put the mode back where the function changes it, or let the loop's body set it before the computation, "
            "from what is the same on every worker (step.number, the loss that step.mean_loss returned)"
        )

    def _sum(self, of_shard: dict[int, Tensor]) -> list[float]:
        on_device = {shard: each.to(self.parts.device) for shard, each in of_shard.items()}
        total: list[float] = self.parts.exchange.sum_shards(on_device, "modes of modules").tolist()
        return total

    def _check_integers(self, signs: list[float]) -> None:
        """Every rank has the same sum, so that all ask for the names, or none does."""
        parts = self.parts
        if parts.buffers.have_same_integers(signs):
            return
        of_shard = {shard: parts.buffers.hashes(after) for shard, after in self.buffers.items()}
        names = parts.buffers.different_integers(parts.exchange.sum_shards(of_shard, "hashes of buffers"))
        raise UsageError(
            f"step {self.number}: expected the integers in buffer {names[0]} to be the same after every shard of the batch, found others "
            "(it counts samples, perhaps, points into a queue or a codebook, or is a zero point of quantisation), so that none is that of the whole batch. Update it in the loop's body, "
            "from a step.sum(...) of what each shard adds (counts, or new entries at their places in zeros); or make it a buffer of floats, which becomes "
            "the mean over shards. Let observers see a fixed batch in the loop's body, and disable them for the function"
        )
