"""When a checkpoint is due, as a function of steps, seconds and what a save costs.

`auto` is Young's interval, sqrt(2 · cost · time between faults) (Young 1974; Daly 2006), for a fault every half hour, which is what
preemptible machines see at their worst; a save that costs training w seconds is then repeated every sqrt(3600 w) seconds.
"""

import math

from elastic.config.durations import Every

FAULT_EVERY_S = 1800.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 600.0


def interval_s(cost_s: float) -> float:
    """Seconds between saves that cost training `cost_s` each."""
    return min(max(math.sqrt(2 * cost_s * FAULT_EVERY_S), MIN_INTERVAL_S), MAX_INTERVAL_S)


def is_due(every: Every, *, step: int, since_s: float, cost_s: float | None) -> bool:
    """Whether the state after `step` is to be saved.

    `since_s`: seconds since the last save began, or since this generation did. `cost_s` is None before its first save: `auto` then
    saves soon, to learn the price and because a young run has nothing to fall back to.
    """
    match every.kind:
        case "steps":
            return step % int(every.value) == 0
        case "seconds":
            return since_s >= every.value
        case "auto":
            return cost_s is None or since_s >= interval_s(cost_s)
        case "off":
            return False
