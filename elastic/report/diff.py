"""Two runs are the same exactly as far as their chain values agree, step by step, and their final digests with them.

It does not promise equality of what neither run recorded: steps that only one of them has are counted, not compared.
"""

from typing import Any

Record = dict[str, Any]


def first_difference(metrics_a: list[Record], metrics_b: list[Record]) -> int | None:
    """The first step whose `chain` differs; None if all steps that both have agree."""
    chains_a, chains_b = _chains(metrics_a), _chains(metrics_b)
    common = sorted(chains_a.keys() & chains_b.keys())
    return next((step for step in common if chains_a[step] != chains_b[step]), None)


def compare(a: Record, metrics_a: list[Record], b: Record, metrics_b: list[Record]) -> Record:
    """Say whether two runs are the same; `a` and `b` are their reports (`report.summarise`).

    Runs of different length differ once the shorter is finished; before that it may still catch up. Runs without a common step
    are not the same: nothing was compared. Returns `same, reason, first_difference, common_steps, a, b`.
    """
    step = first_difference(metrics_a, metrics_b)
    common_steps = len(_chains(metrics_a).keys() & _chains(metrics_b).keys())
    sides = [{key: run[key] for key in ("finished", "steps", "final_digest")} for run in (a, b)]
    reason = _difference(step, common_steps, *sides)
    return {
        "same": reason is None,
        "reason": reason or _agreement(common_steps, *sides),
        "first_difference": step,
        "common_steps": common_steps,
        "a": sides[0],
        "b": sides[1],
    }


def _difference(step: int | None, common_steps: int, a: Record, b: Record) -> str | None:
    if step is not None:
        return f"the first step at which the runs differ is {step}"
    if common_steps == 0:
        return "the runs have no step in common; nothing was compared"
    for name, run, other in (("A", a, b), ("B", b, a)):
        if run["finished"] and run["steps"] < other["steps"]:
            return f"{name} ends at step {run['steps']}, the other goes on to step {other['steps']}; equal until there"
    if a["finished"] and b["finished"] and a["final_digest"] != b["final_digest"]:
        return f"all steps agree, but the final digests differ: {a['final_digest']} and {b['final_digest']}"
    return None


def _agreement(common_steps: int, a: Record, b: Record) -> str:
    if a["finished"] and b["finished"]:
        return f"the same at all {common_steps} steps, and the same final digest"
    unfinished = " and ".join(name for name, run in (("A", a), ("B", b)) if not run["finished"])
    return f"the same at all {common_steps} common steps; {unfinished} not finished"


def _chains(metrics: list[Record]) -> dict[int, Any]:
    return {m["step"]: m["chain"] for m in metrics if m.get("chain") is not None}
