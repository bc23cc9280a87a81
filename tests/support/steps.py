"""The trainer's steps without restores, snapshots and saves, for tests of a recipe's body."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from records import LINK
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from elastic.data.loader import Batch, BatchLoader, Loader
from elastic.data.order import SampleOrder, Tail
from elastic.proof.audit import Auditor
from elastic.reduce.tree import spans_of
from elastic.system.clock import SystemClock
from elastic.system.control_page import ControlPage
from elastic.testing.ranks import Member
from elastic.train.evaluation import Evaluation
from elastic.train.groups import ProcessGroups
from elastic.train.loop.build import LoopParts
from elastic.train.state.state import State
from elastic.train.step.parts import Requests, StepParts
from elastic.train.step.step import Step
from elastic.worker.heartbeat import HeartbeatSender

CPU = torch.device("cpu")
ALONE = Member(rank=0, world_size=1, group=None)
NO_REQUESTS = Requests(drain=False, snapshot=False, save=False)
FEATURES, CLASSES, SAMPLES, BATCH = 6, 3, 48, 24


class NoPage(ControlPage):
    """A control page that no agent reads."""

    def __init__(self) -> None:
        pass

    def beat(self, *_: Any) -> None:
        pass


def samples() -> TensorDataset:
    """float32 [SAMPLES, FEATURES], int64 [SAMPLES]: the same in every process."""
    draw = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(SAMPLES, FEATURES, generator=draw), torch.randint(CLASSES, (SAMPLES,), generator=draw)
    )


class Noisy(Dataset[Any]):
    """Its samples draw from the global generators, which are keyed for each, or from one that no
    one sets, as random crops may; values of all magnitudes, so that each order of additions gives
    other bits.
    """

    def __init__(self, samples: int = SAMPLES, own_draw: np.random.Generator | None = None) -> None:
        self.samples, self.own_draw = samples, own_draw

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, int]:
        values = torch.randn(FEATURES, generator=torch.Generator().manual_seed(sample))
        noise = torch.rand(1) + random.random() + np.random.rand()  # noqa: NPY002
        noise = noise if self.own_draw is None else torch.tensor(self.own_draw.random())
        return values * 10.0 ** (sample % 7) + noise, sample % CLASSES


def loss_of(net: nn.Module) -> Callable[[Batch], torch.Tensor]:
    return lambda batch: cross_entropy(net(batch.data[0]), batch.data[1])


def groups_of(member: Member) -> ProcessGroups:
    """Each rank is a node."""
    return ProcessGroups(
        rank=member.rank,
        world_size=member.world_size,
        local_rank=0,
        device=CPU,
        gradients=member.group,
        control=member.group,
    )


def evaluation(member: Member, dataset: Any, modules: Any = (), **more: Any) -> Evaluation:
    """As run.evaluate makes it, with blocks of five samples."""
    fields: dict[str, Any] = {"heartbeat": HeartbeatSender(NoPage(), 0), "checksum": str} | more
    return Evaluation(
        loader=BatchLoader(dataset=dataset, seed=9, device=CPU, workers=0, collate=None),
        samples=len(dataset),
        batch_size=5,
        modules=list(modules),
        groups=groups_of(member),
        **fields,
    )


def turning_spans(step: int, world_size: int, shards: int) -> list[range]:
    """The shards of each rank in a step: unequal ones, and others in each step."""
    draw = torch.Generator().manual_seed(step)
    inner = torch.randperm(shards - 1, generator=draw)[: world_size - 1] + 1
    ends = [0, *sorted(inner.tolist()), shards]
    return spans_of([end - start for start, end in itertools.pairwise(ends)])


def steps(
    member: Member,
    state: State,
    *,
    shards: int = 8,
    epochs: int = 2,
    dataset: Any = None,
    collate: Any = None,
    workers: int = 0,
    first: int = 1,
    audits: Callable[..., Any] | None = None,
    turns: bool = False,
    log: Any = None,
    redo: Any = None,
    requests: Callable[[int], Requests] = lambda _number: NO_REQUESTS,
) -> Iterator[Step]:
    """Two steps an epoch, with as many samples as `samples` has.

    audits: what watches each step, such as StepAudit.
    turns: each step has other `turning_spans`. log: of the audits, on rank 0 alone. redo: the
    difference because of which these steps begin.
    """
    torch.set_num_threads(1)
    dataset = dataset or samples()
    order = SampleOrder(
        seed=5, samples=len(dataset), global_batch=BATCH, shards=shards, epochs=epochs, tail=Tail.DROP
    )
    groups = groups_of(member)
    parts = StepParts(state, order, groups, HeartbeatSender(NoPage(), 0))
    loader = Loader(dataset=dataset, order=order, device=CPU, collate=collate, workers=workers)
    loop = SimpleNamespace(
        groups=groups,
        loader=loader,
        state=state,
        clock=SystemClock(),
        link=replace(LINK, node=f"node{member.rank}", divergence=redo),
        output=None if member.rank or log is None else SimpleNamespace(log=log),
    )
    auditor = Auditor(cast("LoopParts", loop), parts, parts.buffers.load)
    audit = None if audits is None else partial(audits, auditor)

    def spans(number: int) -> list[range]:
        return turning_spans(number, member.world_size, shards)

    batches = loader.steps_of(
        lambda number: spans(number)[member.rank] if turns else parts.exchange.own_shards, first
    )
    for number in range(first, order.steps + 1):
        if turns:
            parts.exchange.divide(spans(number))
        yield Step(number, parts, partial(next, batches), requests, audit)
        parts.contract.end_step()
    parts.gradients.close()
    parts.contract.close()
