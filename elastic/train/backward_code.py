"""The recipe's own code that a backward calls: hooks on gradients, and functions of autograd."""

import torch

from elastic.data.own_files import is_own_class
from elastic.train.state import State

_HOOKS = "_backward_hooks", "_backward_pre_hooks"
_NAMED = 4


def code_in_backward(state: State) -> list[str]:
    """By name: the first few that may count what they see."""
    found = [
        f"the hook of {state.name_of(p)}"
        for p in state.trained
        if p._backward_hooks  # noqa: SLF001 - no public name
    ]
    for name, module in state.named_modules():
        if any(getattr(module, each) for each in _HOOKS):
            found.append(f"the backward hook of {name}")
    return (found + [f"{each.__qualname__}.backward" for each in _functions()])[:_NAMED]


def _functions() -> list[type]:
    """The recipe's subclasses of torch.autograd.Function."""
    left, found = [torch.autograd.Function], list[type]()
    while left:
        kinds = left.pop().__subclasses__()
        left += kinds
        found += [each for each in kinds if is_own_class(each) and "backward" in vars(each)]
    return found
