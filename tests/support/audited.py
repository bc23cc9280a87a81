"""The trainer's steps with audits, without restores, snapshots and saves."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from steps import NoPage
from torch import Tensor
from torch.utils.data import TensorDataset

from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail
from elastic.errors import StatesDiffer
from elastic.reduce.exchange import Exchange
from elastic.reduce.gradients import Gradients
from elastic.system.clock import SystemClock
from elastic.testing.ranks import Member
from elastic.train.audit import Auditor
from elastic.train.buffers import Buffers
from elastic.train.contract import Contract
from elastic.train.process_groups import ProcessGroups
from elastic.train.shard_outputs import AgreedForms
from elastic.train.side_effects import SideEffects
from elastic.train.state import State, checksum_of
from elastic.train.step import Requests, Step, StepParts
from elastic.worker.heartbeat import HeartbeatSender

CPU = torch.device("cpu")
SAMPLES, BATCH, CLASSES = 48, 24, 3
ALONE = Member(rank=0, world_size=1, group=None)


class Log:
    """Keeps the events that rank 0 records."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def record(self, event: Any) -> None:
        self.events.append(event)


def tensors() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, 6, generator=draw), torch.randint(CLASSES, (SAMPLES,), generator=draw)


class Training:
    """The trainer's loop without restores, snapshots and saves.

    audits: every step is audited. looks: side effects are looked for.
    """

    def __init__(
        self,
        member: Member,
        objects: dict[str, Any],
        *,
        shards: int = 6,
        dataset: Any = None,
        workers: int = 0,
        audits: bool = True,
        looks: bool = False,
    ) -> None:
        order = SampleOrder(
            seed=5, samples=SAMPLES, global_batch=BATCH, shards=shards, epochs=3, tail=Tail.PAD
        )
        state = State(**objects)
        exchange = Exchange(shards=shards, world_size=member.world_size, rank=member.rank, group=member.group)
        contract = Contract(state, global_batch=BATCH, shards=shards)
        self.parts = StepParts(
            exchange=exchange,
            contract=contract,
            gradients=Gradients(contract, exchange),
            forms=AgreedForms(exchange, CPU),
            buffers=Buffers(state, shards, CPU),
            device=CPU,
            heartbeat=HeartbeatSender(NoPage(), 0),
            order=order,
        )
        self.loader = Loader(
            dataset=TensorDataset(*tensors()) if dataset is None else dataset,
            order=order,
            device=CPU,
            workers=workers,
        )
        self.log: Any
        self.log = Log()
        self.auditor = Auditor(
            groups=ProcessGroups(
                rank=member.rank,
                world_size=member.world_size,
                local_rank=0,
                device=CPU,
                gradients=member.group,
                control=member.group,
            ),
            loader=self.loader,
            state=state,
            buffers=self.parts.buffers,
            gradients=self.parts.gradients,
            heartbeat=self.parts.heartbeat,
            clock=SystemClock(),
            node=f"node{member.rank}",
            generation=1,
            compare=self.compare,
            redo=None,
            log=None if member.rank else self.log,
        )
        self.audits = audits
        if looks:
            self.parts = replace(self.parts, side_effects=SideEffects(self.auditor))

    def compare(self) -> None:
        """As the loop does: raise if the ranks' states differed before the step."""
        self.parts.buffers.load()
        states = self.auditor.groups.all_gather(checksum_of(self.auditor.state.flatten()).whole)
        if len(set(states)) > 1:
            raise StatesDiffer("the states differed before", None)

    def steps(self) -> Iterator[Step]:
        batches = self.loader.steps(self.parts.exchange.own_shards, 1)
        nothing = Requests(drain=False, snapshot=False, save=False)
        for number in range(1, self.parts.order.steps + 1):
            auditor = self.auditor if self.audits else None
            yield Step(number, self.parts, partial(next, batches), lambda _number: nothing, auditor)
        self.parts.gradients.close()
