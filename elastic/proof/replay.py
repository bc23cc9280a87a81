"""A step that is done again gives the bits of the first time, or the run does not just go on.

The lines of the metrics that a resume drops say what each lost step gave, as a chain value: a hash
of all losses and gradient norms so far. So this needs to know nothing of how a recipe may depend on
more than its State, and it finds what all ranks do alike. Which lines count is a function of
values.

It does not compare steps that were done once, nor what a step leaves that no later loss or gradient
depends on. A difference says that two processes differ, and not which of them was right.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastic.divergence import Divergence
from elastic.observe.step_line import CHAIN_DIGITS, StepLine


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTime:
    """What a step gave when `generation` did it. loss: None for what is no finite number."""

    step: int
    chain: str
    loss: float | None
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Steps that are done again from the state of `restored`.

    excuse: why they may differ, as a user was told already; empty for no reason. Rank 0 knows it.
    """

    restored: int
    steps: dict[int, FirstTime]
    excuse: str = ""


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
    known: the difference between ranks because of which steps are done again: what its generation
    wrote after the last agreed state came from states of which one was wrong. ended: the newest
    generation that a replay ended. A user who gives the same command after that accepts what the
    script computes now, so that older lines count no more.

    Chain values say something of a step only where they begin from the same value: the line of the
    restored step must be that of its state.
    """
    begins_alike = restored == 0 or (
        last is not None and last.step == restored and last.chain == chain[:CHAIN_DIGITS]
    )
    if not begins_alike:
        return []
    return [
        FirstTime(
            step=line.step,
            chain=line.chain,
            loss=finite(line.loss),
            generation=line.generation,
        )
        for line in dropped
        if isinstance(line.chain, str) and line.generation > ended and not _is_doubtful(line, known)
    ]


def _is_doubtful(line: StepLine, known: Divergence | None) -> bool:
    return known is not None and line.generation == known.generation and line.step > known.agreed


def finite(loss: Any) -> float | None:
    """Of a line, which may hold anything."""
    with suppress(OverflowError):
        if isinstance(loss, (int, float)) and math.isfinite(loss):
            return float(loss)
    return None


def sentence(first: FirstTime, now: float | None, restored: int, run_url: str) -> str:
    """What was expected, what was found, and what to do. now: the loss."""
    done_again = "from the beginning" if restored == 0 else f"from the state of step {restored}"
    read = f"steps {restored + 1} to {first.step} read"
    if first.step == restored + 1:
        read = f"step {first.step} reads"
    return (
        f"step {first.step} was done again {done_again} and gave another result than in generation {first.generation}:"
        f" {_losses(first.loss, now)}. Done from one state, a step has one result. Either the script keeps something outside its State that"
        f" {read} (a class attribute, a counter, a file that it writes; elastic-train check RECIPE looks for such); or it was changed in"
        " between: the script, a file or an environment variable that it reads, a library, the hardware; or a machine computed wrongly, then"
        f" or now. The same command goes on from the newest checkpoint with what the script computes now, and elastic-train report {run_url}"
        f" keeps this difference; --run-dir NEW begins a new run, and --from {run_url} begins it from a state of this one"
    )


def note(first: FirstTime, now: float | None, excuse: str) -> str:
    """Where the run goes on all the same."""
    return (
        f"step {first.step} was done again and gave another result than in generation {first.generation}: {_losses(first.loss, now)}. The run goes"
        f" on, since {excuse}"
    )


def _losses(before: float | None, now: float | None) -> str:
    if before is not None and before == now:
        return f"the loss is {now!r} as before, and the gradients differ"
    return f"loss {_text(before)} then, {_text(now)} now"


def _text(loss: float | None) -> str:
    return "not finite" if loss is None else repr(loss)
