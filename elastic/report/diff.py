"""Two runs are the same as far as their chain values agree, step by step, and their final digests.

It does not promise equality of what neither run recorded: a step that only one of them has is
counted, not compared.
"""

from dataclasses import dataclass, field

import numpy as np

from elastic import events as kinds
from elastic.config import identity
from elastic.config.identity import Identity, SettingDifference
from elastic.observe.logged_event import Events, last
from elastic.report.chains import StepChains


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    finished: bool
    steps: int
    final_digest: str | None
    unreadable_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The fields are the keys of `diff --json`. `reason` is a sentence, also for equal runs; it
    says where lines could not be read, and so were not compared.

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


def compared_run(events: Events, chains: StepChains) -> ComparedRun:
    finished = last(events, kinds.RunFinished)
    return ComparedRun(
        finished=finished is not None,
        steps=finished.event.steps if finished else chains.last_step,
        final_digest=finished.event.digest or None if finished else None,
        unreadable_lines=chains.num_unreadable,
    )


def compare(
    a: ComparedRun,
    chains_a: StepChains,
    b: ComparedRun,
    chains_b: StepChains,
    of: tuple[Identity | None, Identity | None] = (None, None),
) -> Difference:
    """Runs of different length differ once the shorter one is finished; before, it may catch up.

    Runs without a common step are not the same, since nothing was compared.
    """
    step, common_steps = _first_difference(chains_a, chains_b)
    same, reason = _judged(step, common_steps, a, b)
    with_a, with_b = of
    return Difference(
        same=same,
        reason="; ".join([reason, *_not_compared(a, b)]),
        first_difference=step,
        common_steps=common_steps,
        a=a,
        b=b,
        settings=[] if with_a is None or with_b is None else identity.differences(with_a, with_b),
    )


def _first_difference(a: StepChains, b: StepChains) -> tuple[int | None, int]:
    """(the first common step whose values differ, how many steps are common)."""
    (steps_a, bits_a), (steps_b, bits_b) = a.by_step(), b.by_step()
    common, at_a, at_b = np.intersect1d(steps_a, steps_b, assume_unique=True, return_indices=True)
    differ = common[bits_a[at_a] != bits_b[at_b]]
    return int(differ[0]) if len(differ) else None, len(common)


def _judged(step: int | None, common_steps: int, a: ComparedRun, b: ComparedRun) -> tuple[bool, str]:
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
    of = f"{common_steps} of {a.steps}" if common_steps < a.steps else f"all {common_steps}"
    return True, f"the same at {of} steps, and the same final digest"


def _not_compared(a: ComparedRun, b: ComparedRun) -> list[str]:
    counts = [(name, run.unreadable_lines) for name, run in (("A", a), ("B", b)) if run.unreadable_lines]
    return [
        f"{count} line{'' if count == 1 else 's'} in the metrics of {name} cannot be read, and"
        f" {'was' if count == 1 else 'were'} not compared"
        for name, count in counts
    ]
