"""Two runs are the same as far as the chain values of their steps and the digests of states agree.

It does not promise equality of what neither run recorded: a step that only one of them has is
counted, not compared. Nor of values whose first 64 bits agree: a run writes no more of a chain.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic import events as kinds
from elastic.config.identity import SettingDifference
from elastic.observe.logged_event import Events, last, of_kind
from elastic.observe.step_columns import StepBatch
from elastic.observe.step_line import CHAIN_DIGITS
from elastic.report.figures import count

_CHAIN = re.compile(rf"[0-9a-f]{{{CHAIN_DIGITS}}}", re.ASCII)


class StepChains:
    """The chain value of each step of a run, by step: of several lines of one step the last.

    last_step: of the last line, also of one without a value; 0 before the first. num_unreadable:
    lines that are none of a step, and those with a value that no run writes. digests: of the states
    that were saved, by step.
    """

    def __init__(self) -> None:
        self.last_step = self.num_unreadable = 0
        self.by_step: dict[int, int] = {}
        self.digests: dict[int, str] = {}

    def add(self, batch: StepBatch) -> None:
        """The next lines."""
        self.num_unreadable += batch.num_unreadable
        for line in batch.lines:
            self.last_step = line.step
            if isinstance(line.chain, str) and _CHAIN.fullmatch(line.chain):
                self.by_step[line.step] = int(line.chain, 16)
            elif line.chain is not None:
                self.num_unreadable += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    finished: bool
    steps: int
    final_digest: str | None
    unreadable_lines: int = 0

    @classmethod
    def of(cls, events: Events, chains: StepChains) -> "ComparedRun":
        end = last(events, kinds.RunFinished)
        commits = of_kind(events, kinds.CheckpointCommitted)
        chains.digests = {each.event.step: each.event.digest for each in commits if each.event.digest}
        return cls(
            finished=end is not None,
            steps=end.event.steps if end else chains.last_step,
            final_digest=end.event.digest or None if end else None,
            unreadable_lines=chains.num_unreadable,
        )


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

    def text(self) -> str:
        lines = [self.reason]
        for name, run in (("A", self.a), ("B", self.b)):
            end = f"finished, digest {run.final_digest or '-'}" if run.finished else "not finished"
            lines.append(f"{name}: {run.steps} steps, {end}")
        if self.settings and not self.same:
            lines.append(f"they were begun with other settings: {'; '.join(self.settings_text())}")
        return "\n".join(lines)

    def settings_text(self) -> list[str]:
        return [f"{each.setting}: {each.a} in A, {each.b} in B" for each in self.settings]


def compare(a: ComparedRun, chains_a: StepChains, b: ComparedRun, chains_b: StepChains) -> Difference:
    """Runs of different length differ once the shorter one is finished; before, it may catch up.

    Runs without a common step are not the same, since nothing was compared.
    """
    in_a, in_b = chains_a.by_step, chains_b.by_step
    common = in_a.keys() & in_b.keys()
    step = min((step for step in common if in_a[step] != in_b[step]), default=None)
    digests_a, digests_b = _digests(a, chains_a), _digests(b, chains_b)
    saved = sorted(digests_a.keys() & digests_b.keys())
    states = [(at, digests_a[at], digests_b[at]) for at in saved if digests_a[at] != digests_b[at]]
    same, reason = _judged(step, states, len(common), a, b)
    for name, run in (("A", a), ("B", b)):
        if run.unreadable_lines:
            lines = count(run.unreadable_lines, "line", "lines")
            reason += f"; {lines} in the metrics of {name} cannot be read: not compared"
    return Difference(same=same, reason=reason, first_difference=step, common_steps=len(common), a=a, b=b)


def _digests(run: ComparedRun, chains: StepChains) -> dict[int, str]:
    return chains.digests | ({run.steps: run.final_digest} if run.final_digest else {})


def _judged(
    step: int | None,
    states: Sequence[tuple[int, str, str]],
    common_steps: int,
    a: ComparedRun,
    b: ComparedRun,
) -> tuple[bool, str]:
    """(whether the runs are the same, why). states: the steps whose digests differ, with both."""
    if step is not None:
        return False, f"the first step at which the runs differ is {step}"
    if common_steps == 0:
        none = "the runs have no step in common (a script that does not import elastic records none)"
        return False, f"{none}; nothing was compared"
    if states:
        at, of_a, of_b = states[0]
        found = f"all losses agree, but the states after step {at} differ: digests {of_a} and {of_b}"
        return False, f"{found} (also where one State has other entries)"
    for name, run, other in (("A", a, b), ("B", b, a)):
        if run.finished and run.steps < other.steps:
            ends = f"{name} ends at step {run.steps}, and the other goes on to step {other.steps}"
            return False, f"{ends}; until there they are the same"
    if unfinished := [name for name, run in (("A", a), ("B", b)) if not run.finished]:
        which = "neither is" if len(unfinished) > 1 else f"{unfinished[0]} is not"
        return True, f"the same at all {common_steps} common steps; {which} finished"
    of = f"{common_steps} of {a.steps}" if common_steps < a.steps else f"all {common_steps}"
    return True, f"the same at {of} steps, and the same final digest"
