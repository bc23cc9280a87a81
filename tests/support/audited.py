"""The trainer's steps with audits, without restores, snapshots and saves."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from steps import CPU, NO_REQUESTS, auditor_of, parts_of
from torch import Tensor
from torch.utils.data import TensorDataset

from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail
from elastic.errors import StatesDiffer
from elastic.testing.ranks import Member
from elastic.train.state.flat import checksum_of
from elastic.train.state.state import State
from elastic.train.step.step import Step

SAMPLES, BATCH, CLASSES = 48, 24, 3


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

    audits: every step is audited.
    """

    def __init__(
        self,
        member: Member,
        objects: dict[str, Any],
        *,
        shards: int = 6,
        dataset: Any = None,
        collate: Any = None,
        workers: int = 0,
        audits: bool = True,
    ) -> None:
        order = SampleOrder(
            seed=5, samples=SAMPLES, global_batch=BATCH, shards=shards, epochs=3, tail=Tail.PAD
        )
        state = State(**objects)
        self.parts = parts_of(state, order, member)
        self.loader = Loader(
            dataset=TensorDataset(*tensors()) if dataset is None else dataset,
            order=order,
            device=CPU,
            workers=workers,
            collate=collate,
        )
        self.log: Any = Log()
        self.auditor = auditor_of(
            state,
            self.parts,
            self.loader,
            member=member,
            compare=self.compare,
            log=None if member.rank else self.log,
        )
        self.audits = audits

    def compare(self) -> None:
        """As the loop does: raise if the ranks' states differed before the step."""
        self.parts.buffers.load()
        states = self.auditor.groups.all_gather(checksum_of(self.auditor.state.flatten()).whole)
        if len(set(states)) > 1:
            raise StatesDiffer("the states differed before", None)

    def steps(self) -> Iterator[Step]:
        batches = self.loader.steps(self.parts.exchange.own_shards, 1)
        for number in range(1, self.parts.order.steps + 1):
            auditor = self.auditor if self.audits else None
            yield Step(number, self.parts, partial(next, batches), lambda _number: NO_REQUESTS, auditor)
        self.parts.gradients.close()
