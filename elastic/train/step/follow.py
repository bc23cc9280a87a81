"""What modules keep beside their tensors is the same for each shard, and in each process.

*Modes.* A function may call `model.eval()` and leave it at that. The shards after the first would
be computed without dropout, and how many those are depends on the number of workers. So each shard
of a pass begins in the modes that the pass began with; after it they are those that the last shard
left, as after one call in plain PyTorch. It does not see a function that leaves others after some
shards than after the rest: an audit does.

*Derived weights.* `torch.nn.utils.weight_norm`, `spectral_norm` and `prune` keep the weight that a
module computes with in a plain attribute, which only the module's next forward makes again. No
state_dict has it. So it is made again where a state was restored and where a step ends, and the
loop and the script read the same in every process. What the newer `parametrizations` compute is
never stored. Hooks of the recipe's own are not called: whether one counts, or draws random numbers,
cannot be known.

*Cached weights.* `torch.autocast` and `parametrize.cached` keep casts and parametrized weights
until their block ends. Around the loop that would be its end: each step would compute with the
weights of the first one, and a process that restarts with those of the step where it goes on. Where
one shard uses a weight without gradients, the next one would find it without a graph. So they are
dropped at the beginning of a step, before and after each call of a function of the recipe's, and
after each update by an optimizer of torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_TRAINING = attrgetter("training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """flags: of each module, whether it is in training mode. Only modules of the state count."""

    modules: Sequence[nn.Module]
    flags: list[bool]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> "Modes":
        """As they are now."""
        return cls(modules=modules, flags=list(map(_TRAINING, modules)))

    def load(self) -> None:
        """Gives those that were there. Set by attribute: recipes override `train`."""
        if list(map(_TRAINING, self.modules)) != self.flags:
            for module, is_training in zip(self.modules, self.flags, strict=True):
                module.training = is_training


def compute_again(modules: list[nn.Module], *, with_graph: bool = True) -> None:
    """The derived weights. with_graph: as in a forward; copy.deepcopy takes none with a graph."""
    for module in modules:
        for hook in module._forward_pre_hooks.values() if module._forward_pre_hooks else ():  # noqa: SLF001
            with torch.set_grad_enabled(with_graph):
                if isinstance(hook, WeightNorm):
                    setattr(module, hook.name, hook.compute_weight(module))
                elif isinstance(hook, SpectralNorm):  # a power iteration would change buffers
                    weight = hook.compute_weight(module, do_power_iteration=False)
                    setattr(module, hook.name, weight)
                elif isinstance(hook, BasePruningMethod):
                    setattr(module, hook._tensor_name, hook.apply_mask(module))  # type: ignore[no-untyped-call]  # noqa: SLF001


def drop_cached_weights() -> None:
    """It takes a fraction of a microsecond where nothing is cached."""
    torch.clear_autocast_cache()
    if parametrize._cache:  # noqa: SLF001 - it has no function for it
        parametrize._cache.clear()  # noqa: SLF001
