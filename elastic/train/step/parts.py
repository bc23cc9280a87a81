"""What the steps of a generation share, and what each of them ends with on all ranks.

Every rank ends a step with the same outcome, so that all decide the same at the same step.
"""

from dataclasses import dataclass
from typing import NamedTuple

from elastic.data.order import SampleOrder
from elastic.proof.agreement import Agreement
from elastic.proof.step_again import Collected
from elastic.reduce.exchange import Exchange
from elastic.reduce.gradients import Gradients
from elastic.system.clock import Clock, SystemClock
from elastic.train.groups import ProcessGroups
from elastic.train.state.state import State
from elastic.train.step.buffers import Buffers
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
    gradients by hand the norms of the sums that they are made of. own_s: see Pace. shards: how many
    each rank had.
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
    """The parts of one rank's steps. agreement: None where no ranks are compared. collected: of a
    step whose computations are.
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
        self.forms = AgreedForms(self.exchange, self.device)
        self.pace = Pace(groups.rank, groups.world_size, heartbeat)
        self.heartbeat, self.order = heartbeat, order
        self.agreement, self.collected = agreement, collected
