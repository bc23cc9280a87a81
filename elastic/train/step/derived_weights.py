"""A weight that a hook computes from parameters is that of the parameters as they are.

`torch.nn.utils.weight_norm`, `spectral_norm` and `prune` keep the weight that a module computes
with in a plain attribute, which only the module's next forward makes again. No state_dict has it.
What stands there between two forwards would be of the parameters before the update, or, in a
process that resumed, of those that the script has built. So it is made again where a state was
restored and where a step ends, and the loop and the script read the same in every process.

What the newer `torch.nn.utils.parametrizations` compute is never stored. Hooks of the recipe's own
are not called: whether one counts, or draws random numbers, cannot be known.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def compute_again(modules: list[nn.Module], *, with_graph: bool = True) -> None:
    """with_graph: as in a forward. Without, the modules can be copied by `copy.deepcopy`."""
    for module in modules:
        if hooks := module._forward_pre_hooks:  # noqa: SLF001 - no public name
            for hook in hooks.values():
                if name := _derives(hook):
                    with torch.set_grad_enabled(with_graph):
                        setattr(module, name, _computed(hook, module))


def _derives(hook: Any) -> str:
    match hook:
        case WeightNorm() | SpectralNorm():
            return hook.name
        case BasePruningMethod():
            return str(hook._tensor_name)  # noqa: SLF001
        case _:
            return ""


def _computed(hook: Any, module: nn.Module) -> Tensor:
    """As the hook does, but for a power iteration, which changes buffers."""
    found: Tensor
    match hook:
        case SpectralNorm():
            found = hook.compute_weight(module, do_power_iteration=False)
        case WeightNorm():
            found = hook.compute_weight(module)
        case _:
            found = hook.apply_mask(module)
    return found
