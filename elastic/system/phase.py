"""Where in its work a worker is: one word for worker and agent, because what counts as silence differs from place to place."""

from enum import IntEnum


class Place(IntEnum):
    START = 0  # imports, building the model, restoring, and a generation's first steps
    STEP = 1  # its own part of a step's sums and gradients
    WAIT = 2  # for other ranks, inside a collective operation of a step
    BETWEEN = 3  # the recipe's own code: before and after a step's sums, evaluation, loading data
    SAVE = 4  # copying or comparing the state, or waiting for a last commit
    AFTER = 5  # the recipe's own code once the last step is saved: for as long as it likes
