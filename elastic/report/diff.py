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

    @staticmethod
    def of(report: Report) -> "ComparedRun":
        return ComparedRun(finished=report.finished, steps=report.steps, final_digest=report.final_digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The fields are the keys of `diff --json`. `reason` is a sentence, also for equal runs."""

    same: bool
    reason: str
    first_difference: int | None
    common_steps: int
    a: ComparedRun
    b: ComparedRun


def first_difference(lines_a: Sequence[StepLine], lines_b: Sequence[StepLine]) -> int | None:
    """The first step whose `chain` differs; None if all steps that both have agree."""
    chains_a, chains_b = _chains(lines_a), _chains(lines_b)
    common = sorted(chains_a.keys() & chains_b.keys())
    return next((step for step in common if chains_a[step] != chains_b[step]), None)


def compare(a: Report, lines_a: Sequence[StepLine], b: Report, lines_b: Sequence[StepLine]) -> Difference:
    """Runs of different length differ once the shorter one is finished; before, it may catch up.

    Runs without a common step are not the same, since nothing was compared.
    """
    step = first_difference(lines_a, lines_b)
    common_steps = len(_chains(lines_a).keys() & _chains(lines_b).keys())
    runs = ComparedRun.of(a), ComparedRun.of(b)
    reason = _difference(step, common_steps, *runs)
    return Difference(
        same=reason is None,
        reason=reason or _agreement(common_steps, *runs),
        first_difference=step,
        common_steps=common_steps,
        a=runs[0],
        b=runs[1],
    )


def _difference(step: int | None, common_steps: int, a: ComparedRun, b: ComparedRun) -> str | None:
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


def _agreement(common_steps: int, a: ComparedRun, b: ComparedRun) -> str:
    if a.finished and b.finished:
        return f"the same at all {common_steps} steps, and the same final digest"
    unfinished = " and ".join(name for name, run in (("A", a), ("B", b)) if not run.finished)
    return f"the same at all {common_steps} common steps; {unfinished} not finished"


def _chains(lines: Sequence[StepLine]) -> dict[int, Any]:
    return {line.step: line.chain for line in lines if line.chain is not None}
