"""What the steps of a generation share, and the one sum after which all ranks know the same.

Every rank ends a step with the same outcome, so that all decide the same at the same step. The
vector of that sum carries losses, requests, votes on the state before the step, how long each rank
worked, which gradients exist, and buffers. Then each rank has the step's gradients in `.grad` and
the step's buffers in its modules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from elastic.data.order import SampleOrder
from elastic.errors import UsageError
from elastic.proof.agreement import Agreement
from elastic.proof.step_again import Collected
from elastic.reduce.exchange import Exchange
from elastic.reduce.gradients import Gradients
from elastic.system.clock import Clock, SystemClock
from elastic.train.groups import ProcessGroups
from elastic.train.state.state import State
from elastic.train.step.buffers import Buffers, Contents
from elastic.train.step.contract import Contract
from elastic.train.step.sums import AgreedForms
from elastic.worker.heartbeat import HeartbeatSender

_SHORTEST_S = 1e-9  # 0 means that a rank has not measured


class Requests(NamedTuple):
    """What one rank asks of all ranks.

    It rides in the end-of-step all-reduce, so that every rank decides the same at the same step.
    """

    drain: bool
    snapshot: bool
    save: bool  # a snapshot that becomes a checkpoint
    audit: bool = False  # an audit of the next step
    compare: bool = False  # the ranks' states after the step
    rehearse: bool = False  # the next step
    at_once: bool = False  # a drain without a step more


class StepPlace(NamedTuple):
    """How far a rank is in the loop; a later place is greater.

    step: the one whose body runs. passes: how often a function of it was computed over the shards.
    computed: its gradients are known.
    """

    step: int
    passes: int
    computed: bool

    def __str__(self) -> str:
        return f"in step {self.step}, {'after' if self.computed else 'before'} its gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step ends with, identical on all ranks.

    loss: of the last computation, NaN where the library computed none. losses: of all of them; of
    gradients by hand the norms of the sums that they are made of. own_s: seconds, by rank
    (Pace). shards: how many each rank had.
    """

    loss: float
    losses: tuple[float, ...]
    requests: Requests  # each is made if any rank made it
    own_s: tuple[float, ...] = ()
    shards: tuple[int, ...] = ()


class Pace:
    """How long each rank worked for a step, apart from its waits for the others.

    A synchronous step takes every rank as long as the slowest one, so that its duration names none.
    A rank's own seconds are those from the end of one end-of-step sum to the beginning of the next,
    less the waits in between (heartbeat.py). They ride in that sum, in a place for each rank: no
    message more. They are measured by each rank's own clock, and never enter the training state.

    It is not exact on a GPU: a host that waits for its own kernels in a sum counts as waiting.
    """

    def __init__(self, rank: int, world_size: int, heartbeat: HeartbeatSender, clock: Clock | None = None):
        self._rank = rank
        self._world_size = world_size
        self._heartbeat = heartbeat
        self._clock: Clock = clock or SystemClock()
        self._since_s: float | None = None  # the end of the sum before, waits taken off

    def numbers(self) -> list[float]:
        """What this rank adds to the sum: a place for each rank, none where it is alone."""
        if self._world_size == 1:
            return []
        places = [0.0] * self._world_size
        if self._since_s is not None:
            places[self._rank] = max(_SHORTEST_S, self._worked_s() - self._since_s)
        return places

    def read(self, sums: list[float]) -> tuple[float, ...]:
        """Each rank's own seconds, by rank; empty where it is alone, and in the first step."""
        self._since_s = self._worked_s()
        return tuple(sums) if all(sums) else ()

    def _worked_s(self) -> float:
        return self._clock.monotonic() - self._heartbeat.waited_s


class StepParts:
    """The parts of one rank's steps. agreement: None where no ranks are compared. collected: what
    each computation of a step that may be done again leaves.
    """

    def __init__(
        self,
        state: State,
        order: SampleOrder,
        groups: ProcessGroups,
        heartbeat: HeartbeatSender,
        agreement: Agreement | None = None,
        collected: Collected | None = None,
    ) -> None:
        shards, self.device = order.shards, groups.device
        self.exchange = Exchange(
            shards=shards, world_size=groups.world_size, rank=groups.rank, group=groups.gradients
        )
        self.contract = Contract(state)
        self.gradients = Gradients(self.contract, self.exchange)
        self.buffers = Buffers(state, shards, self.device)
        self.forms = AgreedForms(groups)
        self.pace = Pace(groups.rank, groups.world_size, heartbeat)
        self.heartbeat, self.order = heartbeat, order
        self.agreement, self.collected = agreement, collected

    def end(
        self,
        number: int,
        loss: Tensor | None,
        losses: dict[int, Tensor],
        after: dict[int, Contents],
        requests: Callable[[int], Requests],
    ) -> StepOutcome:
        """The end of step `number`, or of one of its computations.

        loss: known to every rank already, or None where it is the mean of `losses`. losses: of the
        own shards, none where `loss` is known. after: the buffers after each own shard. requests:
        called with the step's number once the gradients are summed. The host waits for the device
        where it reads all numbers. Raises UsageError for integers in buffers that differ
        between shards, PeerLost when another rank is gone, and what a vote on the states raises.
        """
        sums = self.buffers.sums
        with self.heartbeat.waiting():
            flats = self.gradients.wait()
        asks = requests(number)
        own_votes = [] if self.agreement is None else self.agreement.numbers()
        said = [*asks, *own_votes, *self.pace.numbers()]
        with self.heartbeat.waiting():
            contributions = self._contributions([*said, *self.gradients.used()], losses, after)
            total = self.exchange.sum_shards(contributions, "the end of a step")
            of_ranks = len(total) - sums.length
            mean = total[:1] / self.exchange.shards if loss is None else loss
            numbers, (known_loss,), signs = self._read(total[1:of_ranks], mean, sums.signs(total[of_ranks:]))
        rest, used = iter(numbers[: len(said)]), numbers[len(said) :]
        asked, votes = list(islice(rest, len(asks))), list(islice(rest, len(own_votes)))
        own_s = self.pace.read(list(rest))
        if self.agreement is not None:
            self.agreement.read(votes, undo=self.buffers.load)
        self.gradients.assign(flats, used)
        with self.heartbeat.waiting():
            self.gradients.add_late(used)
            if self.collected is not None and self.collected.step == number:
                parameters = self.gradients.parameters
                self.collected.add(losses, ((self.contract.name_of(each), each) for each in parameters))
            self._end_buffers(number, total[of_ranks:], signs, after)
        return StepOutcome(
            loss=known_loss,
            losses=(known_loss,),
            requests=Requests(*(count > 0 for count in asked)),
            own_s=own_s,
            shards=tuple(map(len, self.exchange.spans)),
        )

    def _contributions(
        self, of_rank: list[float], losses: dict[int, Tensor], after: dict[int, Contents]
    ) -> dict[int, Tensor]:
        """The vector of each own shard, float64.

        It is [1] its loss, [7] the fields of Requests, [2 · ranks] votes on the state before this
        step and [ranks] seconds that each of them worked (none with one rank), [parameters] whether
        a gradient exists, [sums.length] its buffers. Numbers of a rank, not of a shard, are in
        a rank's first shard alone.
        """
        own_shards = self.exchange.own_shards
        heads = torch.zeros(len(own_shards), 1 + len(of_rank), dtype=torch.float64)
        # A rank's requests count once, whatever the number of its shards.
        heads[0, 1:] = torch.tensor(of_rank, dtype=torch.float64)
        heads = heads.to(self.device)
        if losses:
            heads[:, 0] = torch.stack([losses[shard].view(()) for shard in own_shards])
        if self.buffers.sums.length:
            buffers = self.buffers.contributions(after)
            heads = torch.cat([heads, torch.stack([buffers[shard] for shard in own_shards])], 1)
        return dict(zip(own_shards, heads.unbind(), strict=True))

    def _end_buffers(
        self, number: int, total: Tensor, signs: list[float], after: dict[int, Contents]
    ) -> None:
        """total: the sum of the shards' contributions. signs: read from it.

        Every rank has the same, so that all raise UsageError, or none does.
        """
        buffers = self.buffers
        if buffers.found_changes(signs):
            what = "buffers that forward changed for the first time"
            total = self.exchange.sum_shards(buffers.contributions(after), what)
            (signs,) = self._read(buffers.sums.signs(total))
        if not buffers.sums.have_same_integers(signs):
            names = buffers.changed_integers(after.values())
            raise UsageError(
                f"step {number}: expected integer buffers to be the same after every shard, found others in {names or 'some'}; update them in the "
                "loop's body, by a step.sum(...), or make them floats, which become the mean"
            )
        buffers.end(total, signs)

    def _read(self, *tensors: Tensor) -> list[list[float]]:
        """The numbers of each, in one wait for the device."""
        flat = [each.reshape(-1).to(self.device, torch.float64) for each in tensors]
        numbers = iter(torch.cat(flat).tolist())
        return [list(islice(numbers, each.numel())) for each in tensors]
