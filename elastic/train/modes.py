"""Each shard of a pass begins with its modules in the modes that the pass began with.

A function may call `model.eval()` and leave it at that. The shards after the first would be
computed without dropout, and how many those are depends on the number of workers. After a pass the
modes are those that the function left, as after one call in plain PyTorch.

Only modules of the state count, and that the function leaves the same modes after each shard is not
checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import nn

_mode_of = attrgetter("training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """flags: of each module, whether it is in training mode."""

    modules: Sequence[nn.Module]
    flags: list[bool]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> "Modes":
        """As they are now."""
        return cls(modules=modules, flags=list(map(_mode_of, modules)))

    def load(self) -> None:
        """Set them by attribute: `train` sets modules inside as well, and recipes override it."""
        if list(map(_mode_of, self.modules)) != self.flags:
            for module, is_training in zip(self.modules, self.flags, strict=True):
                module.training = is_training
