"""The function of a step leaves each parameter frozen, or not, as it found it.

What requires a gradient when a computation begins decides what is summed. A function that freezes
or unfreezes for good would change that for the next shard of the same worker alone, and then for
whatever follows. A function may do so for itself, and put it back before it returns.
"""

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter, ne

from torch import nn

_requires_grad = attrgetter("requires_grad")
_NAMED = 3


class GradientFlags:
    """Which of these parameters require a gradient. flags: in their order."""

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
        f"{not is_frozen}) and leaves that so. The shards after this one, on the same worker alone, would begin with it, and the result would depend on how many workers "
        "there are. Set requires_grad in the loop's body, before step.mean_loss or step.sum, and before each of them where a step has several (a GAN's two "
        "losses); or put it back before the function returns"
    )
