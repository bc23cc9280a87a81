"""Neighbouring lines of metrics as a list for each field: a million are added up in a second.

Numbers are added up one by one, in the order of the steps: no figure depends on how many lines come
at once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from types import NoneType
from typing import Any, Protocol

ABSENT = object()  # the value of a name that a line does not have


class ReadStep(Protocol):
    """What counts of a line, whatever read it: a StepLine, but for the recipe's values."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> Any: ...
    @property
    def world_size(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def time(self) -> float | None: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def audited(self) -> bool | None: ...
    @property
    def slowest_rank(self) -> int | None: ...
    @property
    def slowest_s(self) -> float | None: ...
    @property
    def others_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The fields are those of StepLine, in lists of one length, which may be 0.

    values: by name, what the recipe logged in each step, or ABSENT; empty where the
    reader was not asked for values.
    """

    step: list[int]
    loss: list[Any]
    world_size: list[int]
    generation: list[int]
    time: list[float | None]
    seconds: list[float | None]
    audited: list[bool | None]
    slowest_rank: list[int | None]
    slowest_s: list[float | None]
    others_s: list[float | None]
    values: Mapping[str, list[Any]] = field(default_factory=dict)

    def by_generation(self) -> Iterator[tuple[int, "StepBatch"]]:
        """Those of each generation, in their order; without values."""
        begin = 0
        for generation, group in groupby(self.generation):
            end = begin + len([*group])
            yield generation, self._part(slice(begin, end))
            begin = end

    def _part(self, part: slice) -> "StepBatch":
        return StepBatch(
            step=self.step[part],
            loss=self.loss[part],
            world_size=self.world_size[part],
            generation=self.generation[part],
            time=self.time[part],
            seconds=self.seconds[part],
            audited=self.audited[part],
            slowest_rank=self.slowest_rank[part],
            slowest_s=self.slowest_s[part],
            others_s=self.others_s[part],
        )


def batch_of(lines: Sequence[ReadStep], values: Mapping[str, list[Any]] | None = None) -> StepBatch:
    return StepBatch(
        step=[line.step for line in lines],
        loss=[line.loss for line in lines],
        world_size=[line.world_size for line in lines],
        generation=[line.generation for line in lines],
        time=[line.time for line in lines],
        seconds=[line.seconds for line in lines],
        audited=[line.audited for line in lines],
        slowest_rank=[line.slowest_rank for line in lines],
        slowest_s=[line.slowest_s for line in lines],
        others_s=[line.others_s for line in lines],
        values=values or {},
    )


def has(kind: type, values: Sequence[Any]) -> bool:
    """Whether one is of this type. `None in values` would ask each number if it equals None."""
    return kind in set(map(type, values))


def known(values: list[float | None]) -> list[float]:
    """Without None."""
    return [each for each in values if each is not None] if has(NoneType, values) else values  # type: ignore[return-value]


def added_up(values: Iterable[float], begin: float) -> float:
    """One by one: `sum` of newer Pythons compensates for what is lost, within one call."""
    total = begin
    for total in accumulate(values, initial=begin):  # noqa: B007
        pass
    return total
