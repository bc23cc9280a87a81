"""A storm is a function of its seed: which deed strikes when, and whom; and what goodput the published formulas expect of it.

The mix follows published failure counts (Llama 3's 419 interruptions, ByteDance's 778,135 jobs), as far as processes of one machine can fail in these ways. Network faults are
there as a node that is silent for longer than its keep-alive. It does not promise that a deed finds a victim: a group may have no worker at that moment.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FaultKind(Enum):
    WORKER_KILLED = "worker killed"
    WORKER_ABORTED = "worker aborted"  # as a sticky error of a device ends it
    WORKER_SEGFAULT = "worker segfault"
    WORKER_HANGS = "worker hangs"
    WORKER_SLOW = "worker slow"
    NODE_SILENT = "node silent"
    NODE_DRAINED = "node drained"
    NODE_KILLED = "node killed"
    UPLOADER_KILLED = "uploader killed"
    WARM_PARENT_KILLED = "warm parent killed"


# Shares in percent. The last two are parts that only this program has.
MIX = {
    FaultKind.WORKER_KILLED: 35,
    FaultKind.WORKER_ABORTED: 20,
    FaultKind.WORKER_SEGFAULT: 13,
    FaultKind.WORKER_HANGS: 10,
    FaultKind.NODE_SILENT: 9,
    FaultKind.NODE_DRAINED: 8,
    FaultKind.WORKER_SLOW: 3,
    FaultKind.NODE_KILLED: 2,
    FaultKind.UPLOADER_KILLED: 1,
    FaultKind.WARM_PARENT_KILLED: 1,
}
# These cost no recovery: training goes on beside them.
HARMLESS = (FaultKind.WORKER_SLOW, FaultKind.UPLOADER_KILLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """`at_s` after the beginning of the storm; `victim`, in [0, 1), says which of those that there are then."""

    at_s: float
    kind: FaultKind
    victim: float


def fault_schedule(
    seed: int, *, mtbf_s: float, duration_s: float, mix: dict[FaultKind, int] = MIX
) -> list[PlannedFault]:
    """Faults that know nothing of each other: the gaps are exponential with mean `mtbf_s`. Raises ValueError for a rate or a mix that cannot be."""
    if not mtbf_s > 0 or not any(mix.values()) or min(mix.values()) < 0:
        raise ValueError(
            f"expected a time between faults above 0 and a mix of shares, found {mtbf_s} and {mix}"
        )
    draw = random.Random(seed)  # noqa: S311 - it chooses victims
    faults, at_s = [], draw.expovariate(1 / mtbf_s)
    while at_s < duration_s:
        kind = draw.choices(list(mix), list(mix.values()))[0]
        faults.append(PlannedFault(at_s=at_s, kind=kind, victim=draw.random()))
        at_s += draw.expovariate(1 / mtbf_s)
    return faults


def expected_goodput(*, mtbf_s: float, recovery_s: float, interval_s: float, save_s: float) -> float:
    """E[ETTR] = (1 - (u0 + dt/2) / M) / (1 + w/dt), of "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (Meta, HPCA 2025).

    mtbf_s: M, between faults that cost a recovery; recovery_s: u0, from a fault to the next new step; interval_s: dt, from one kept state to the next, of
    which a fault loses half on average; save_s: w, by which keeping one holds up training. First order: never below 0, where faults come faster than recoveries.
    """
    if mtbf_s == math.inf:
        return 1 / (1 + save_s / interval_s)
    return max(0.0, (1 - (recovery_s + interval_s / 2) / mtbf_s) / (1 + save_s / interval_s))


def best_interval_s(*, mtbf_s: float, save_s: float) -> float:
    """Young's and Daly's: sqrt(2 w M)."""
    return math.sqrt(2 * save_s * mtbf_s)


def num_recoveries(faults: Sequence[PlannedFault]) -> int:
    """How many of them cost a recovery."""
    return sum(fault.kind not in HARMLESS for fault in faults)
