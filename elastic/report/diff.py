"""Two runs are the same as far as their chain values agree, step by step, and their final digests.

It does not promise equality of what neither run recorded: a step that only one of them has is
counted, not compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.config import identity
from elastic.config.identity import Identity, SettingDifference
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
    settings: what the runs were begun with that is not the same, as far as both say.
    """

    same: bool
    reason: str
    first_difference: int | None
    common_steps: int
    a: ComparedRun
    b: ComparedRun
    settings: list[SettingDifference] = field(default_factory=list)


def compare(
    a: Report,
    lines_a: Sequence[StepLine],
    b: Report,
    lines_b: Sequence[StepLine],
    begun_with: tuple[Identity | None, Identity | None] = (None, None),
) -> Difference:
    """Runs of different length differ once the shorter one is finished; before, it may catch up.

    Runs without a common step are not the same, since nothing was compared.
    """
    chains_a, chains_b = _chains(lines_a), _chains(lines_b)
    common = sorted(chains_a.keys() & chains_b.keys())
    step = next((step for step in common if chains_a[step] != chains_b[step]), None)
    same, reason = _judged(step, len(common), a, b)
    with_a, with_b = begun_with
    return Difference(
        same=same,
        reason=reason,
        first_difference=step,
        common_steps=len(common),
        a=_compared(a),
        b=_compared(b),
        settings=[] if with_a is None or with_b is None else identity.differences(with_a, with_b),
    )


def _compared(run: Report) -> ComparedRun:
    return ComparedRun(finished=run.finished, steps=run.steps, final_digest=run.final_digest)


def _judged(step: int | None, common_steps: int, a: Report, b: Report) -> tuple[bool, str]:
    """(whether the runs are the same, why)."""
    if step is not None:
        return False, f"the first step at which the runs differ is {step}"
    if common_steps == 0:
        return False, "the runs have no step in common; nothing was compared"
    for name, run, other in (("A", a, b), ("B", b, a)):
        if run.finished and run.steps < other.steps:
            ends = f"{name} ends at step {run.steps}, and the other goes on to step {other.steps}"
            return False, f"{ends}; until there they are the same"
    if unfinished := [name for name, run in (("A", a), ("B", b)) if not run.finished]:
        which = "neither is" if len(unfinished) > 1 else f"{unfinished[0]} is not"
        return True, f"the same at all {common_steps} common steps; {which} finished"
    if a.final_digest != b.final_digest:
        found = f"{a.final_digest} and {b.final_digest}"
        return False, f"all steps agree, but the final digests differ: {found}"
    return True, f"the same at all {common_steps} steps, and the same final digest"


def _chains(lines: Sequence[StepLine]) -> dict[int, Any]:
    return {line.step: line.chain for line in lines if line.chain is not None}
