"""The trainer's steps with another cut of the shards in each step, and audits on demand."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from audited import BATCH, SAMPLES, tensors
from steps import CPU, NO_REQUESTS, auditor_of, parts_of
from torch.utils.data import TensorDataset

from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail
from elastic.reduce.tree import span, spans_of
from elastic.testing.ranks import Member
from elastic.train.state.state import State
from elastic.train.step.step import Step

Cut = Callable[[int], Sequence[int]]  # from a step to the number of shards of each rank


def equal(world_size: int, shards: int) -> Cut:
    """That of a run which nobody disturbs."""
    return lambda _step: [len(span(shards, world_size, rank)) for rank in range(world_size)]


def turning(world_size: int, shards: int) -> Cut:
    """Unequal after the first step, and another one in each."""

    def cut(step: int) -> list[int]:
        if step == 1:
            return list(equal(world_size, shards)(step))
        draw = torch.Generator().manual_seed(step)
        inner = torch.randperm(shards - 1, generator=draw)[: world_size - 1] + 1
        ends = [*sorted(inner.tolist()), shards]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    return cut


def steps(
    member: Member,
    state: State,
    cut: Cut,
    *,
    shards: int = 6,
    dataset: Any = None,
    workers: int = 0,
    audits: bool = False,
) -> Iterator[Step]:
    """Six steps in three epochs."""
    torch.set_num_threads(1)
    order = SampleOrder(seed=5, samples=SAMPLES, global_batch=BATCH, shards=shards, epochs=3, tail=Tail.PAD)
    dataset = TensorDataset(*tensors()) if dataset is None else dataset
    loader = Loader(dataset=dataset, order=order, device=CPU, workers=workers)
    parts = parts_of(state, order, member)
    auditor = auditor_of(state, parts, loader, member=member)
    batches = loader.steps_of(lambda number: spans_of(cut(number))[member.rank], 1)
    for number in range(1, order.steps + 1):
        parts.exchange.divide(spans_of(cut(number)))
        load = partial(next, batches)
        step = Step(number, parts, load, lambda _number: NO_REQUESTS, auditor if audits else None)
        yield step
        if step.outcome is None:
            step.end_by_hand()
        parts.contract.end_step()
    parts.gradients.close()
    parts.contract.close()
