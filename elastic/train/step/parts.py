"""What the steps of a generation share, and the one sum after which all ranks know the same.

Every rank ends a step with the same outcome, so that all decide the same at the same step. The
vector of that sum carries losses, requests, votes on the state before the step, how long each rank
worked, which gradients exist, and buffers. Then each rank has the step's gradients in `.grad` and
the step's buffers in its modules.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from elastic.data.order import SampleOrder
from elastic.data.random_keys import key
from elastic.errors import UsageError
from elastic.proof.agreement import Agreement
from elastic.proof.step_again import Collected
from elastic.reduce import tree
from elastic.reduce.exchange import Exchange, decode, encode
from elastic.reduce.gradients import Gradients
from elastic.system.clock import Clock, SystemClock
from elastic.train.groups import ProcessGroups
from elastic.train.sharded.sums import strides
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


NOTHING = Requests(drain=False, snapshot=False, save=False)


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
        """What this rank tells: a place for each rank."""
        places = [0.0] * self._world_size
        if self._since_s is not None:
            places[self._rank] = max(_SHORTEST_S, self._worked_s() - self._since_s)
        return places

    def read(self, sums: list[float]) -> tuple[float, ...]:
        """Each rank's own seconds, by rank; empty in the first step."""
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
        self.contract, self.sharded = Contract(state), state.sharded
        if self.sharded is not None:
            self.exchange.divide(strides(shards, groups.world_size))
        self.gradients = Gradients(self.contract, self.exchange)
        self.buffers = Buffers(state, shards, self.device)
        self.forms = AgreedForms(groups)
        self.pace = Pace(groups.rank, groups.world_size, heartbeat)
        self.heartbeat, self.order = heartbeat, order
        # How the keys of random streams begin, of steps and of their shards.
        self.of_steps, self.of_shards = key(order.seed, "step"), key(order.seed, "shard")
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
        asks, exchange = requests(number), self.exchange
        own = [losses[shard] for shard in exchange.own_shards] if losses else []
        known_loss = [] if loss is None else [loss]
        ballots = [] if self.agreement is None else self.agreement.ballots()
        used: Iterator[float] = iter(())
        own_s: tuple[float, ...] = ()
        of_shards: Sequence[float]
        if exchange.world_size == 1:
            total = self._sum_buffers(after)
            of_shards, known, signs = self._read(own, known_loss, self._signs(total))
        else:
            order = [] if self.sharded is None else self.sharded.order()
            said = [*asks, *self.pace.numbers(), *order, *self.gradients.used()]
            with self.heartbeat.waiting():
                sums = self.gradients.sum(encode(self._words(own, ballots), said))
                total = self._sum_buffers(after)
                told, known, signs = self._read([sums], known_loss, self._signs(total))
            words, told = decode(told, exchange.shards + len(ballots))
            of_shards = struct.unpack(
                f"<{exchange.shards}d", struct.pack(f"<{exchange.shards}Q", *words[: exchange.shards])
            )
            used = iter(told)
            asks = Requests(*map(bool, islice(used, len(asks))))
            own_s = self.pace.read(list(islice(used, exchange.world_size)))
            if self.sharded is not None:
                self.sharded.check_order(list(islice(used, len(order))))
            if self.agreement is not None:
                self.agreement.read(words[exchange.shards :], undo=self.buffers.load)
        self.gradients.assign(list(used))
        if self.collected is not None and self.collected.step == number:
            those = [*self.gradients.parameters, *self.contract.sharded]
            named = ((self.contract.name_of(each), each) for each in those)
            self.collected.add(losses, named)
        if total is not None:
            self._end_buffers(number, total, signs, after)
        mean = known[0] if known else tree.total(of_shards) / exchange.shards
        shards = tuple(map(len, exchange.spans))
        return StepOutcome(loss=mean, losses=(mean,), requests=asks, own_s=own_s, shards=shards)

    def _words(self, own: Sequence[Tensor], ballots: Sequence[int]) -> Tensor:
        """int64 [shards + ballots]: bits of the own losses in their shards' places, and ballots.

        own: the losses, of one number each, or none.
        """
        shards = self.exchange.own_shards
        signed = [ballot - (ballot >> 63 << 64) for ballot in ballots]
        words = torch.tensor([0] * self.exchange.shards + signed, dtype=torch.int64, device=self.device)
        if own:
            numbers = torch.cat([each.reshape(1).to(self.device, torch.float64) for each in own])
            words[shards.start : shards.stop : shards.step] = numbers.view(torch.int64)
        return words

    def _sum_buffers(self, after: dict[int, Contents]) -> Tensor | None:
        """The sum of the shards' contributions, float64 [sums.length]; None where it is empty."""
        if not self.buffers.sums.length:
            return None
        return self.exchange.sum_shards(self.buffers.contributions(after), "the buffers of a step")

    def _read(self, *groups: Sequence[Tensor]) -> list[list[float]]:
        """The numbers of each group, in one wait for the device."""
        tensors = [each.reshape(-1) for group in groups for each in group]
        if len(tensors) > 1:
            read = torch.cat([each.to(self.device, torch.float64) for each in tensors]).tolist()
        else:
            read = tensors[0].tolist() if tensors else []
        found = iter(read)
        return [list(islice(found, sum(map(Tensor.numel, group)))) for group in groups]

    def _signs(self, total: Tensor | None) -> list[Tensor]:
        return [] if total is None else [self.buffers.sums.signs(total)]

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
            (signs,) = self._read(self._signs(total))
        if not buffers.sums.have_same_integers(signs):
            names = buffers.changed_integers(after.values())
            raise UsageError(
                f"step {number}: expected integer buffers to be the same after every shard, found others in {names or 'some'}; update them in the "
                "loop's body, by a step.sum(...), or make them floats, which become the mean"
            )
        buffers.end(total, signs, next(iter(after.values())))
