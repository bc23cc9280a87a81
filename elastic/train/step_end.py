"""The end of a step is one all-reduce of one vector, after which all ranks know the same.

It carries losses, requests, votes on the state before the step, how long each rank worked, which
gradients exist, and buffers.
Then each rank has the step's gradients in `.grad` and the step's buffers in its modules.
"""

from collections.abc import Callable
from dataclasses import dataclass

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

    def exchange(self, loss: float | None, losses: dict[int, float]) -> StepOutcome:
        """loss: known to every rank already, or None where it is the mean of `losses`.

        losses: of the own shards. Raises UsageError for integers in buffers, and for modes, that
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
        of_rank = torch.cat([torch.tensor(said, dtype=torch.float64), parts.gradients.used()])
        contributions = self._contributions(of_rank.to(parts.device), losses)
        of_shards = 3 + len(said)
        like = _like(parts, 3 + len(of_rank) + parts.buffers.length)
        with parts.heartbeat.waiting():
            total = parts.exchange.sum_shards(contributions, "the end of a step", like)
            if parts.exchange.has_idle:
                of_ranks = parts.exchange.sum_ranks(
                    of_rank.to(parts.device), "what ranks say at the end of a step"
                )
                total[3 : 3 + len(of_rank)] = of_ranks
        sizes = [of_shards, total.numel() - of_shards - parts.buffers.length, parts.buffers.length]
        head, used, buffers = torch.split(total, sizes)
        loss_sum, hashes, squares, *sums = head.tolist()
        own_s = parts.pace.read(sums[len(asks) + len(votes) :])
        asked, votes = sums[: len(asks)], sums[len(asks) : len(asks) + len(votes)]
        if parts.agreement is not None:
            parts.agreement.read(votes, undo=parts.buffers.load)
        if not are_equal((hashes, squares), parts.exchange.shards):
            self._refuse_modes()
        with parts.heartbeat.waiting():
            follow_modes(parts, self.modes)
        parts.gradients.assign(flats, used)
        with parts.heartbeat.waiting():
            parts.gradients.add_late(used)
        if parts.buffers.found_changes(buffers):
            late = parts.buffers.contributions(self.buffers)
            with parts.heartbeat.waiting():
                buffers = parts.exchange.sum_shards(
                    late,
                    "buffers that forward changed for the first time",
                    _like(parts, parts.buffers.length),
                )
        self._check_integers(buffers)
        # Of those that optimizers hold: the others come to buckets by what this process has seen.
        trained = flats[: parts.gradients.trained_buckets]
        parts.buffers.end(buffers)
        return StepOutcome(
            loss=loss if loss is not None else loss_sum / parts.exchange.shards,
            gradient_norms=tuple(float(torch.linalg.vector_norm(flat)) for flat in trained),
            requests=Requests(*(count > 0 for count in asked)),
            own_s=own_s,
            shards=tuple(map(len, parts.exchange.spans)),
        )

    def _contributions(self, of_rank: Tensor, losses: dict[int, float]) -> dict[int, Tensor]:
        """The vector of each own shard, float64.

        It is [1] its loss, [2] a number for the modes that it left and its square, [5] the fields
        of Requests, [2 · ranks] votes on the state before this step and [ranks] seconds that each
        of them worked (none with one rank), [parameters] whether a gradient exists,
        [buffers.length] its buffers. What is said by ranks and not by shards is in a rank's first
        shard alone; in a sum of its own where a rank has no shard.
        """
        parts = self.parts
        contributions, buffers = {}, parts.buffers.contributions(self.buffers)
        modes = self.modes.numbers()
        for index, shard in enumerate(parts.exchange.own_shards):
            own = torch.tensor([losses[shard], *modes[shard]], dtype=torch.float64, device=parts.device)
            # A rank's requests count once, whatever the number of its shards.
            is_said = index == 0 and not parts.exchange.has_idle
            head = torch.cat([own, of_rank * is_said])
            contributions[shard] = torch.cat([head, buffers[shard]])
        return contributions

    def _refuse_modes(self) -> None:
        """Raises UsageError, on every rank."""
        parts, shards = self.parts, self.parts.exchange.shards
        name = "a module"
        if are_equal(_sum(parts, self.modes.sizes(), 2), shards):
            totals = _sum(parts, self.modes.flags(), len(self.modes.modules))
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

    def _check_integers(self, total: Tensor) -> None:
        """Every rank has the same sum, so that all ask for the names, or none does."""
        parts = self.parts
        if parts.buffers.have_same_integers(total):
            return
        of_shard = {shard: parts.buffers.hashes(after) for shard, after in self.buffers.items()}
        like = parts.buffers.like_hashes
        total = parts.exchange.sum_shards(of_shard, "hashes of buffers", like)
        names = parts.buffers.different_integers(total)
        raise UsageError(
            f"step {self.number}: expected the integers in buffer {names[0]} to be the same after every shard of the batch, found others "
            "(it counts samples, perhaps, points into a queue or a codebook, or is a zero point of quantisation), so that none is that of the whole batch. Update it in the loop's body, "
            "from a step.sum(...) of what each shard adds (counts, or new entries at their places in zeros); or make it a buffer of floats, which becomes "
            "the mean over shards. Let observers see a fixed batch in the loop's body, and disable them for the function"
        )


def follow_modes(parts: StepParts, modes: StepModes) -> None:
    """After a pass, where a rank has no shard: its modules take the modes that the shards left.

    Where shards left different ones, the end of the step refuses that. Raises PeerLost.
    """
    shards = parts.exchange.shards
    if not parts.exchange.has_idle or not are_equal(_sum(parts, modes.sizes(), 2), shards):
        return
    total = _sum(parts, modes.flags(), len(modes.modules))
    if not parts.exchange.own_shards:
        modes.follow(total, shards)


def _sum(parts: StepParts, of_shard: dict[int, Tensor], length: int) -> list[float]:
    on_device = {shard: each.to(parts.device) for shard, each in of_shard.items()}
    total: list[float] = parts.exchange.sum_shards(
        on_device, "modes of modules", _like(parts, length)
    ).tolist()
    return total


def _like(parts: StepParts, length: int) -> Tensor:
    """A float64 vector of this length, without memory."""
    return torch.empty((), dtype=torch.float64, device=parts.device).expand(length)
