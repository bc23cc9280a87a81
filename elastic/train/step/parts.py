"""What the steps of a generation share, and what each of them ends with on all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from elastic.data.loader import Batch
from elastic.data.order import SampleOrder
from elastic.proof.agreement import Agreement
from elastic.proof.step_again import Collected
from elastic.reduce.exchange import Exchange
from elastic.reduce.gradients import Gradients
from elastic.train.groups import ProcessGroups
from elastic.train.state.state import State
from elastic.train.step.buffers import Buffers
from elastic.train.step.contract import Contract
from elastic.train.step.pace import Pace
from elastic.train.step.shard_outputs import AgreedForms
from elastic.worker.heartbeat import HeartbeatSender


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

    loss: NaN where the library computed none. gradient_norms: of each bucket, or of the sums that
    the recipe makes its gradients of. own_s: see pace.py. shards: how many each rank had.
    """

    loss: float
    gradient_norms: tuple[float, ...]
    requests: Requests  # each is made if any rank made it
    own_s: tuple[float, ...] = ()
    shards: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """agreement: None where no ranks are compared. collected: of a step whose computations are.

    any_shard: loads a shard of a step for a call whose result nothing uses; None where each rank
    has shards.
    """

    exchange: Exchange
    contract: Contract
    gradients: Gradients
    buffers: Buffers
    forms: AgreedForms
    device: torch.device
    heartbeat: HeartbeatSender
    pace: Pace
    order: SampleOrder
    agreement: Agreement | None = None
    collected: Collected | None = None
    any_shard: Callable[[int], Batch] | None = None


def step_parts(
    state: State,
    order: SampleOrder,
    groups: ProcessGroups,
    heartbeat: HeartbeatSender,
    agreement: Agreement | None = None,
    collected: Collected | None = None,
) -> StepParts:
    """Of one rank."""
    shards, device = order.shards, groups.device
    exchange = Exchange(shards=shards, world_size=groups.world_size, rank=groups.rank, group=groups.gradients)
    contract = Contract(state, global_batch=order.global_batch, shards=shards)
    return StepParts(
        exchange=exchange,
        contract=contract,
        gradients=Gradients(contract, exchange),
        buffers=Buffers(state, shards, device),
        forms=AgreedForms(exchange, device),
        device=device,
        heartbeat=heartbeat,
        pace=Pace(groups.rank, groups.world_size, heartbeat),
        order=order,
        agreement=agreement,
        collected=collected,
    )
