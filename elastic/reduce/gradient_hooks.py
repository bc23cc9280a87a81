"""Autograd calls one hook at each parameter whose gradient is summed: the step's own.

A hook of the recipe's at the same place would see the gradient of one shard, and change it.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import compress
from operator import attrgetter, ne
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from elastic.errors import UsageError

_requires_grad = attrgetter("requires_grad")
_NAMED = 3


class GradientHooks:
    """hook: a method, called after each gradient. name_of: a parameter, for an error."""

    def __init__(self, hook: Callable[[nn.Parameter], None], name_of: Callable[[nn.Parameter], str]) -> None:
        self._hook = hook
        self._function = getattr(hook, "__func__", None)
        self._name_of = name_of
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        self._parameters: Sequence[nn.Parameter] = []  # of the computation that was begun last
        self._hooks: list[dict[int, Any]] = []  # of each of them, all that it has

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """One hook for each parameter that requires a gradient; torch has none for others."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._handles:
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._hook)  # type: ignore[no-untyped-call]

    def attach(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before the backwards. parameters: of the computation, in a list that never changes."""
        if parameters is not self._parameters:
            self._parameters = parameters
            self._hooks = [p._post_accumulate_grad_hooks for p in parameters]  # noqa: SLF001

    def check(self) -> None:
        """After the backwards. Raises UsageError for a hook of the recipe's."""
        if sum(map(len, self._hooks)) != len(self._hooks):
            for parameter, hooks in zip(self._parameters, self._hooks, strict=True):
                if not all(map(self._is_ours, hooks.values())):
                    raise UsageError(not_ours(self._name_of(parameter)))

    def _is_ours(self, hook: Any) -> bool:
        """Also that of a loop which ended in an error, and whose hooks nothing has removed."""
        return getattr(hook, "__func__", hook) is self._function

    def watched(self) -> Collection[nn.Parameter]:
        return self._handles.keys()

    def remove(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            self._handles.pop(parameter).remove()


def not_ours(name: str) -> str:
    """What the user reads. name: of the parameter."""
    return (
        f"expected gradients that stay in .grad until the step's sum, found a post-accumulate hook at {name}; change gradients "
        "in the loop's body, after step.mean_loss or step.backward"
    )


class GradientFlags:
    """Which of these parameters require a gradient. flags: in their order.

    The parameters that require a gradient when a computation begins are summed. A function that
    freezes or unfreezes for good would change that for the next shard of the same worker alone, and
    then for what follows. It may do so for itself, and put it back before it returns.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.flags = list(map(_requires_grad, parameters))

    def changed(self) -> list[nn.Parameter]:
        """Those that have another one now."""
        now = list(map(_requires_grad, self._parameters))
        return [] if now == self.flags else [*compress(self._parameters, map(ne, now, self.flags))]


def left_changed(names: list[str], *, is_frozen: bool) -> str:
    """What the user reads. names: of parameters that the function has frozen, or unfrozen."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"the function given to step.mean_loss or step.sum has {'frozen' if is_frozen else 'unfrozen'} {', '.join(names[:_NAMED])}{more} (requires_grad = "
        f"{not is_frozen}) and leaves that so; set requires_grad in the loop's body, or put it back before the function returns"
    )
