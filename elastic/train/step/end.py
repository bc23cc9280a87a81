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
from elastic.train.step.modes import StepModes, are_equal
from elastic.train.step.opening_buffers import Contents
from elastic.train.step.parts import Requests, StepOutcome, StepParts


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
        parts, is_right_after = self.parts, loss is None  # the end of the pass, or of sums before
        with parts.heartbeat.waiting():
            flats = parts.gradients.wait()
        self.fault_point("mid-sum")
        asks = self.requests(self.number)
        own_votes = [] if parts.agreement is None else parts.agreement.numbers()
        said = [*asks, *own_votes, *parts.pace.numbers()]
        with parts.heartbeat.waiting():
            total = self._sum_up([*said, *parts.gradients.used()], losses)
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
        rest = iter(sums)
        asked, votes = list(islice(rest, len(asks))), list(islice(rest, len(own_votes)))
        own_s = parts.pace.read(list(rest))
        if parts.agreement is not None:
            parts.agreement.read(votes, undo=parts.buffers.load)
        if not are_equal((hashes, squares), parts.exchange.shards):
            self._refuse_modes()
        if is_right_after:  # after a sum the body may have set others, on every rank
            with parts.heartbeat.waiting():
                follow_modes(parts, self.modes)
        parts.gradients.assign(flats, used)
        with parts.heartbeat.waiting():
            parts.gradients.add_late(used)
        self._collect(losses)
        if parts.buffers.found_changes(signs):
            late = parts.buffers.contributions(self.buffers)
            with parts.heartbeat.waiting():
                buffers = parts.exchange.sum_shards(
                    late,
                    "buffers that forward changed for the first time",
                    _like(parts, parts.buffers.length),
                )
                (signs,) = self._read(parts.buffers.signs(buffers))
        self._check_integers(signs)
        parts.buffers.end(buffers, signs)
        return StepOutcome(
            loss=known_loss,
            gradient_norms=tuple(norm for (norm,) in of_norms),
            requests=Requests(*(count > 0 for count in asked)),
            own_s=own_s,
            shards=tuple(map(len, parts.exchange.spans)),
        )

    def _collect(self, losses: dict[int, Tensor]) -> None:
        """Evidence of a step that is compared."""
        parts = self.parts
        if parts.collected is not None and parts.collected.step == self.number:
            parameters = parts.gradients.parameters
            parts.collected.add(losses, ((parts.contract.name_of(each), each) for each in parameters))

    def _sum_up(self, of_rank: list[float], losses: dict[int, Tensor]) -> Tensor:
        """Of all shards' contributions."""
        parts = self.parts
        contributions = self._contributions(of_rank, losses)
        like = _like(parts, 3 + len(of_rank) + parts.buffers.length)
        total = parts.exchange.sum_shards(contributions, "the end of a step", like)
        if parts.exchange.has_idle:
            ours = torch.tensor(of_rank, dtype=torch.float64).to(parts.device)
            what = "what ranks say at the end of a step"
            total[3 : 3 + len(of_rank)] = parts.exchange.sum_ranks(ours, what)
        return total

    def _contributions(self, of_rank: list[float], losses: dict[int, Tensor]) -> dict[int, Tensor]:
        """The vector of each own shard, float64.

        It is [1] its loss, [2] a number for the modes that it left and its square, [5] the fields
        of Requests, [2 · ranks] votes on the state before this step and [ranks] seconds that each
        of them worked (none with one rank), [parameters] whether a gradient exists,
        [buffers.length] its buffers. What is said by ranks and not by shards is in a rank's first
        shard alone; in a sum of its own where a rank has no shard.
        """
        parts = self.parts
        own_shards = parts.exchange.own_shards
        buffers, modes = parts.buffers.contributions(self.buffers), self.modes.numbers()
        if not own_shards:
            return {}
        heads = torch.zeros(len(own_shards), 3 + len(of_rank), dtype=torch.float64)
        heads[:, 1:3] = torch.tensor([modes[shard] for shard in own_shards], dtype=torch.float64)
        if not parts.exchange.has_idle:
            # A rank's requests count once, whatever the number of its shards.
            heads[0, 3:] = torch.tensor(of_rank, dtype=torch.float64)
        heads = heads.to(parts.device)
        if losses:
            heads[:, 0] = torch.stack([losses[shard].view(()) for shard in own_shards])
        if parts.buffers.length:
            heads = torch.cat([heads, torch.stack([buffers[shard] for shard in own_shards])], 1)
        return dict(zip(own_shards, heads.unbind(), strict=True))

    def _read(self, *tensors: Tensor) -> list[list[float]]:
        """The numbers of each, in one wait for the device."""
        flat = [each.reshape(-1).to(self.parts.device, torch.float64) for each in tensors]
        numbers = iter(torch.cat(flat).tolist())
        return [list(islice(numbers, each.numel())) for each in tensors]

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

    def _check_integers(self, signs: list[float]) -> None:
        """Every rank has the same sum, so that all ask for the names, or none does."""
        parts = self.parts
        if parts.buffers.have_same_integers(signs):
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
