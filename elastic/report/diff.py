"""Two runs are the same as far as their chain values agree, step by step, and their final digests.

It does not promise equality of what neither run recorded: a step that only one of them has is
counted, not compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic.observe.step_line import StepLine
from elastic.report.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    finished: bool
    steps: int
    final_digest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The fields are the keys of `diff --json`. `reason` is a sentence, also for equal runs.

    first_difference: the first step whose `chain` differs; None if all steps that both have agree.
    """

    same: bool
    reason: str
    first_difference: int | None
    common_steps: int
    a: ComparedRun
    b: ComparedRun


def compare(a: Report, lines_a: Sequence[StepLine], b: Report, lines_b: Sequence[StepLine]) -> Difference:
    """Runs of different length differ once the shorter one is finished; before, it may catch up.

    Runs without a common step are not the same, since nothing was compared.
    """
    chains_a, chains_b = _chains(lines_a), _chains(lines_b)
    common = sorted(chains_a.keys() & chains_b.keys())
    step = next((step for step in common if chains_a[step] != chains_b[step]), None)
    reason = _difference(step, len(common), a, b)
    return Difference(
        same=reason is None,
        reason=reason or _agreement(len(common), a, b),
        first_difference=step,
        common_steps=len(common),
        a=_compared(a),
        b=_compared(b),
    )


def _compared(run: Report) -> ComparedRun:
    return ComparedRun(finished=run.finished, steps=run.steps, final_digest=run.final_digest)


def _difference(step: int | None, common_steps: int, a: Report, b: Report) -> str | None:
    if step is not None:
        return f"the first step at which the runs differ is {step}"
    if common_steps == 0:
        return "the runs have no step in common; nothing was compared"
    for name, run, other in (("A", a, b), ("B", b, a)):
        if run.finished and run.steps < other.steps:
            return (
                f"{name} ends at step {run.steps}, the other goes on to step {other.steps}; equal until there"
            )
    if a.finished and b.finished and a.final_digest != b.final_digest:
        return f"all steps agree, but the final digests differ: {a.final_digest} and {b.final_digest}"
    return None


def _agreement(common_steps: int, a: Report, b: Report) -> str:
    if a.finished and b.finished:
        return f"the same at all {common_steps} steps, and the same final digest"
    unfinished = " and ".join(name for name, run in (("A", a), ("B", b)) if not run.finished)
    return f"the same at all {common_steps} common steps; {unfinished} not finished"


def _chains(lines: Sequence[StepLine]) -> dict[int, Any]:
    return {line.step: line.chain for line in lines if line.chain is not None}
