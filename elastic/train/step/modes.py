"""Each shard of a pass begins with its modules in the modes that the pass began with.

A function may call `model.eval()` and leave it at that. The shards after the first would be
computed without dropout, and how many those are depends on the number of workers. After a pass the
modes are those that the function left, as after one call in plain PyTorch. A function that leaves
others after some shards than after the rest (`if labels.sum() > 0: model.eval()`) is refused at the
end of that step: the loop would go on in the modes of the last shard of each worker.

Only modules of the state count.
"""

import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

_by_attribute, _by_key = attrgetter("training"), itemgetter("training")
_BITS = 20  # of a hash: sums over 4096 shards of its squares are exact in float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """flags: of each module, whether it is in training mode.

    spaces: their own attributes, if all have it among these. Reading there takes half the time.
    """

    modules: Sequence[nn.Module]
    flags: list[bool]
    spaces: list[dict[str, Any]] | None

    @classmethod
    def of(cls, modules: Sequence[nn.Module], spaces: list[dict[str, Any]] | None = None) -> "Modes":
        """As they are now. spaces: the modules' own attributes, for a caller that has them."""
        spaces = list(map(vars, modules)) if spaces is None else spaces
        with suppress(KeyError):
            return cls(modules=modules, flags=list(map(_by_key, spaces)), spaces=spaces)
        return cls(modules=modules, flags=list(map(_by_attribute, modules)), spaces=None)

    def now(self) -> list[bool]:
        """What the flags would be now."""
        if self.spaces is None:
            return list(map(_by_attribute, self.modules))
        return list(map(_by_key, self.spaces))

    def load(self) -> list[bool]:
        """Gives those that were there. Set by attribute: recipes override `train`."""
        now = self.now()
        if now != self.flags:
            for module, is_training in zip(self.modules, self.flags, strict=True):
                module.training = is_training
        return now


class StepModes:
    """What each own shard leaves in the passes of one step, so that all shards can be compared.

    Where all numbers of n shards are equal, and only there, n times the sum of their squares is the
    square of their sum: the sum at the end of a step tells it.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []  # of one pass after the other
        self._left: dict[int, list[list[bool]]] = {}
        self._begun: int | None = None  # the shard that is computed

    def begin_pass(self, modules: Sequence[nn.Module], spaces: list[dict[str, Any]] | None = None) -> Modes:
        """As `Modes.of`."""
        self._pass, self._before = Modes.of(modules, spaces), list[bool]()
        self.modules += modules
        return self._pass

    def begin_shard(self, shard: int) -> None:
        """As the pass began."""
        if self._begun is not None:
            self._end_shard(self._begun, self._pass.load())
        self._begun = shard

    def end_pass(self) -> None:
        """The modes stay as the last shard has left them."""
        if self._begun is not None:
            self._end_shard(self._begun, self._pass.now())
        self._begun = None

    def _end_shard(self, shard: int, left: list[bool]) -> None:
        if left != self._before:
            self._before = left  # the same list as long as they are equal, for `numbers`
        self._left.setdefault(shard, []).append(self._before)

    def numbers(self) -> dict[int, tuple[float, float]]:
        """Of each own shard a hash and its square."""
        known: dict[tuple[int, ...], tuple[float, float]] = {}
        found = {}
        for shard, of_passes in self._left.items():
            which = tuple(map(id, of_passes))
            if which not in known:
                number = zlib.crc32(b".".join(map(bytes, of_passes))) >> (32 - _BITS)
                known[which] = float(number), float(number * number)
            found[shard] = known[which]
        return found

    def follow(self, total: list[float], shards: int) -> None:
        """In a rank without a shard: leave the modes as the shards of the last pass left theirs.

        total: the sum of all shards' `flags`, which are equal.
        """
        flags = [number > shards / 2 for number in total[len(total) - len(self._pass.flags) :]]
        replace(self._pass, flags=flags).load()

    def sizes(self) -> dict[int, Tensor]:
        """How many flags each own shard has, as `numbers` has its hash: float64 [2]."""
        count = len(self.modules)
        return {shard: torch.tensor([count, count * count], dtype=torch.float64) for shard in self._left}

    def flags(self) -> dict[int, Tensor]:
        """All flags of each own shard, float64 [passes · modules]."""
        return {
            shard: torch.tensor([flag for flags in of_passes for flag in flags], dtype=torch.float64)
            for shard, of_passes in self._left.items()
        }


def are_equal(numbers: Sequence[float], shards: int) -> bool:
    """numbers: the sums over all shards of a number and of its square."""
    total, squares = map(int, numbers)
    return shards * squares == total * total
