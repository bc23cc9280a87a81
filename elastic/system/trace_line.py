"""What a worker writes for `elastic-train check`, and what the check reads.

The format stands here because neither of the two imports the other.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLine:
    """A step as one generation trained it.

    steps, shards: of the whole run. chain, loss: those of the step. logged: what the recipe logged,
    as text. entries: the checksum of each entry of the state.
    """

    step: int
    generation: int
    world_size: int
    steps: int
    shards: int
    chain: str
    loss: str
    logged: dict[str, str]
    entries: dict[str, str]
