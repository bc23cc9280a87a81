"""A step that is done again gives the losses of the first time, or the run does not just go on.

The lines of the metrics that a resume drops say what each lost step gave, as a chain value: a hash
of all losses so far. So this needs to know nothing of how a recipe may depend on more than its
State, and it finds what all ranks do alike. Rank 0 has read the lines; all ranks know the compared
numbers after each step, so that no message is needed until a step differs.

It does not compare steps that were done once, nor what a step leaves that no later loss depends on.
A difference says that two processes differ, and not which of them was right.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.data.record import DataRecord, has_same_steps
from elastic.divergence import Divergence
from elastic.errors import ReplayDiffers
from elastic.events import ReplayDiffered
from elastic.observe.log import EventLog, read_rare
from elastic.observe.metrics import Rewound
from elastic.observe.step_line import CHAIN_DIGITS, StepLine
from elastic.proof.step_again import no_determinism
from elastic.system.untrusted import finite
from elastic.train.groups import ProcessGroups
from elastic.train.loop.build import LoopParts
from elastic.train.state.restore import ResumePoint


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTime:
    """What a step gave when `generation` did it. loss: None where it is not finite."""

    step: int
    chain: str
    loss: float | None
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Steps that are done again from the state of `restored`.

    excuse: why they may differ, as a user was told already; empty for no reason.
    """

    restored: int
    steps: list[FirstTime]
    excuse: str = ""


class ReplayCheck:
    """log: on rank 0 alone. steps: that are to be compared yet, by number."""

    def __init__(self, begun: Replay, run_url: str, log: EventLog | None) -> None:
        self._begun = begun
        self.steps = {each.step: each for each in begun.steps}
        self._run_url = run_url
        self._log = log

    def check(self, line: StepLine, groups: ProcessGroups) -> None:
        """Before the line of a step is written, or its state kept.

        Raises ReplayDiffers on every rank where it differs and nothing excuses it.
        """
        first = self.steps.pop(line.step, None)
        if first is None or first.chain == line.chain:
            return
        self.steps = {}  # a chain value stays another one
        now, restored, excuse = finite(line.loss), self._begun.restored, ""
        if self._log is not None:
            excuse = self._begun.excuse or no_determinism()
            event = ReplayDiffered(
                step=line.step, restored=restored, loss_before=first.loss, loss_now=now, excuse=excuse
            )
            self._log.record(event)
        # Only now may another rank end: its agent kills those of its node that have not.
        excuse = groups.from_rank0(excuse)
        found = (
            f"step {first.step} was done again from the state of step {restored} and gave another result than in generation {first.generation}: "
            f"loss {_text(first.loss)} then, {_text(now)} now"
        )
        if not excuse:
            raise ReplayDiffers(
                f"{found}. The script keeps something outside its State (elastic-train check RECIPE finds it), or what it reads was changed, or a machine computed "
                f"wrongly. The same command goes on with what the script computes now; --from {self._run_url} --run-dir NEW begins a new run"
            )
        if self._log is not None:
            print(f"{found}. The run goes on, since {excuse}", flush=True)


def begin_replay(
    parts: LoopParts, point: ResumePoint, rewound: Rewound, there: DataRecord, now: DataRecord
) -> Replay:
    """The steps that must come out as before, on every rank.

    there: what stands beside the state; at step 0 the same as now. Steps of another length
    of the run are said to be others already. A check by `elastic-train check` compares more.
    """
    found: list[FirstTime] = []
    excuse, last, dropped = "", rewound.last, rewound.dropped
    if parts.output is not None and dropped and parts.trace is None:
        if there.recipe and has_same_steps(there, now):
            ends = [each for each in read_rare(parts.run_dir.events, ReplayDiffered) if not each.event.excuse]
            ended = max((each.generation for each in ends), default=0)
            found = first_times(
                last, dropped, restored=point.step, chain=point.chain, known=point.divergence, ended=ended
            )
        excuse = "the recipe was edited in between" if there.recipe != now.recipe else ""
    return parts.groups.from_rank0(Replay(restored=point.step, steps=found, excuse=excuse))


def first_times(
    last: StepLine | None,
    dropped: Sequence[StepLine],
    *,
    restored: int,
    chain: str,
    known: Divergence | None,
    ended: int,
) -> list[FirstTime]:
    """The lost steps that must come out as before.

    last: the newest line that stayed. dropped: those after it. chain: of the state of `restored`.
    known: the difference between ranks that has steps done again: what its generation wrote after
    the last agreed state came from states that differed. ended: the newest
    generation that a replay ended. A user who gives the same command after that accepts what the
    script computes now, so that older lines count no more.

    Chain values say something of a step only where they begin from the same value: the line of the
    restored step must be that of its state.
    """
    is_its_line = last is not None and last.step == restored and last.chain == chain[:CHAIN_DIGITS]
    if restored != 0 and not is_its_line:
        return []
    return [
        FirstTime(step=line.step, chain=line.chain, loss=finite(line.loss), generation=line.generation)
        for line in dropped
        if isinstance(line.chain, str) and line.generation > ended and not _is_doubtful(line, known)
    ]


def _is_doubtful(line: StepLine, known: Divergence | None) -> bool:
    return known is not None and line.generation == known.generation and line.step > known.agreed


def _text(loss: float | None) -> str:
    return "not finite" if loss is None else repr(loss)
