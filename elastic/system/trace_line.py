"""What a worker writes for `elastic-train check`, and what the check reads.

The format stands here because neither of the two imports the other.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstGradient:
    """How far the first gradient lies from that of the whole batch, as a share of its norm.

    difference: None where they could not be compared, because of `obstacle`. parameter: the one
    that contributes most to it. in_eval: why both are those of eval mode; empty where both are
    those of training.
    """

    difference: float | None
    parameter: str
    obstacle: str
    in_eval: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLine:
    """A step as one generation trained it.

    steps, shards: of the whole run. entries: the evidence of the step, and what the recipe logged.
    gradient: of the first step alone. epoch: from 0. notes: what the run said on its console, since
    the line before, about what is exact and perhaps not meant.
    """

    step: int
    generation: int
    world_size: int
    steps: int
    shards: int
    entries: dict[str, str]
    gradient: FirstGradient | None = None
    epoch: int = 0
    notes: list[str] = field(default_factory=list)
