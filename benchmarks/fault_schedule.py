"""A schedule of faults is a function of its seed; and the goodput that published formulas expect.

The mix follows published failure counts (Llama 3's 419 interruptions, ByteDance's 778,135 jobs), as
far as processes of one machine can fail in these ways. A network fault becomes a node that is
silent for longer than its keep-alive. A fault need not find a victim: the group may have no worker
at that moment.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FaultKind(Enum):
    WORKER_KILLED = "worker killed"
    WORKER_ABORTED = "worker aborted"  # as after a sticky CUDA error
    WORKER_SEGFAULT = "worker segfault"
    WORKER_HANGS = "worker hangs"
    WORKER_SLOW = "worker slow"
    NODE_SILENT = "node silent"
    NODE_DRAINED = "node drained"
    NODE_KILLED = "node killed"
    UPLOADER_KILLED = "uploader killed"
    FORK_SERVER_KILLED = "fork server killed"


# Shares in percent. The last two kinds hit processes that other launchers do not have.
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
    FaultKind.FORK_SERVER_KILLED: 1,
}
# Faults that need no recovery: training goes on.
HARMLESS = (FaultKind.WORKER_SLOW, FaultKind.UPLOADER_KILLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """at_s: seconds after the start of the schedule. victim: in [0, 1), the place among the
    candidates.
    """

    at_s: float
    kind: FaultKind
    victim: float


def fault_schedule(
    seed: int, *, mtbf_s: float, duration_s: float, mix: dict[FaultKind, int] = MIX
) -> list[PlannedFault]:
    """Independent faults: the gaps are exponential with mean `mtbf_s`.

    mix: relative shares. Raises ValueError if `mtbf_s` is not positive, or if the mix is empty or
    negative.
    """
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
    """E[ETTR] = (1 - (u0 + dt/2) / M) / (1 + w/dt), a first-order model.

    Source: "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", Meta, HPCA
    2025. Returns 0 where faults come faster than recoveries.

    mtbf_s: M, mean time between faults that need a recovery.
    recovery_s: u0, from a fault to the end of the next new step.
    interval_s: dt, from one kept state to the next; a fault loses half of it on average.
    save_s: w, by which keeping a state delays training.
    """
    if mtbf_s == math.inf:
        return 1 / (1 + save_s / interval_s)
    return max(0.0, (1 - (recovery_s + interval_s / 2) / mtbf_s) / (1 + save_s / interval_s))


def best_interval_s(*, mtbf_s: float, save_s: float) -> float:
    """The best interval between saves by Young and Daly: sqrt(2 w M)."""
    return math.sqrt(2 * save_s * mtbf_s)


def num_recoveries(faults: Sequence[PlannedFault]) -> int:
    """The number of faults that need a recovery."""
    return sum(fault.kind not in HARMLESS for fault in faults)
