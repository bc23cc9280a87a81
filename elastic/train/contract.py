"""A step does what the recipe means, or ends the run with a sentence that names what is wrong.

Everything here is asked in every step, and must be cheap: benchmarks/steady.py shows its share.
"""

from torch import nn

from elastic.train.state import State


class Contract:
    """What is followed and checked in the steps of one generation."""

    def __init__(self, state: State) -> None:
        self._state = state

    def trained(self) -> list[nn.Parameter]:
        return self._state.trained

    def name_of(self, parameter: nn.Parameter) -> str:
        return self._state.name_of(parameter)

    def accumulated_outside(self, parameter: nn.Parameter) -> None:
        """A backward of the recipe's own."""
