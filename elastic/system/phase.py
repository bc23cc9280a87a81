"""A worker is in one phase of its work at a time; the agent allows each phase its own silence.

The order of the numbers means nothing.
"""

from enum import IntEnum


class Phase(IntEnum):
    START = 0  # imports, building the model, restoring, and the first steps of a generation
    STEP = 1  # this rank's part of the sums and gradients of a step
    WAIT = 2  # inside a collective operation of a step, for other ranks
    BETWEEN = 3  # the recipe's own code: before and after the sums of a step, evaluation, loading
    SAVE = 4  # copying or comparing the state, or waiting for the last commit
    AFTER = 5  # the recipe's own code after the last step is saved, which may take any time
