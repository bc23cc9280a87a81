"""A recipe is tried as a user would try it: by the command itself, again and again.

Each run is a process of its own, with a run directory in a temporary folder (runs.py), and each one
breaks something else (plan.py). Nothing else is written, unless the recipe writes elsewhere than to
`run.path`. What is compared was written by the workers (proof/trace.py).
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from elastic.check.causes import cause
from elastic.check.compare import FirstDifference, first_difference, unsteady_values
from elastic.check.plan import (
    AGAIN,
    CALM,
    CALM_SECONDS,
    GRADIENT,
    GRADIENT_LIMIT,
    LEAST_STEPS,
    Launch,
    launches,
    left_out,
)
from elastic.check.proof import Checked, Proof, Result, Verdict
from elastic.check.runs import LIMIT_S, Ended, News, Runs
from elastic.config.options import CheckOptions
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_USAGE, ElasticError, UsageError
from elastic.system.trace_line import FirstGradient, TraceLine

Tell = Callable[[Proof], None]

_OTHER_END = (
    "what ends the loop is of one process alone, such as a counter or a clock: decide by step.number, the loss that step.mean_loss returns, "
    "run.evaluate or elastic.Values, or give run.data(steps=...)"
)


class RecipeFailed(ElasticError):  # noqa: N818
    """The calm run did not come through: there is nothing to compare."""


def check(options: CheckOptions, tell: Tell, news: News) -> Checked:
    """tell: is given each proof as soon as it is known. news: of `signals_as_news`.

    Raises UsageError or RecipeFailed where the calm run by one worker does not come through, and
    CheckStopped at a signal. In any case its processes and its folder are gone.
    """
    temporary = tempfile.TemporaryDirectory(prefix="elastic-check-", ignore_cleanup_errors=True)
    # Left in the opposite order: the processes go before their folder.
    with temporary as folder, Runs(options, Path(folder), news) as runs:
        calm = _calm(options, runs)
        steps, of_run = calm.lines[-1].step, _steps_of_run(calm)
        note = f"the first {steps} of {of_run} steps, with which the others are compared"
        if calm.stopped is not None:
            note = f"all {steps} steps, after which the recipe ends the run ({calm.stopped})"
        tell(Proof(proof=CALM, workers=1, result=Result.EXACT, seconds=calm.seconds, note=note))
        return _prove(options, runs, tell, calm)


def _calm(options: CheckOptions, runs: Runs) -> Ended:
    least, seconds = (LEAST_STEPS, CALM_SECONDS) if options.steps is None else (options.steps, 0.0)
    runs.begin(CALM, [Launch(proof=CALM, workers=1, gradient=True)], least, seconds)
    calm = runs.end_of(CALM, 0)
    assert calm is not None, "no command is before it"
    if calm.code == EXIT_USAGE:
        raise UsageError(calm.words)
    if calm.code != EXIT_COMPLETE or not calm.lines:
        advice = "; give it less data or a smaller model" if calm.code is None else ""
        if calm.code is None and len(calm.lines) >= LEAST_STEPS // 2:
            advice = f"; --steps {LEAST_STEPS // 2} compares fewer steps"
        raise RecipeFailed(
            f"{calm.words}\nthe calm run by one worker ended with {_ending(calm)} after {len(calm.lines)} steps; nothing was compared{advice}"
        )
    return calm


def _prove(options: CheckOptions, runs: Runs, tell: Tell, calm: Ended) -> Checked:
    expected = {line.step: line for line in calm.lines}
    steps, shards, ends = max(expected), calm.lines[-1].shards, _epoch_ends(calm.lines)
    chains = {str(number): chain for number, chain in enumerate(launches(steps, shards, ends))}
    for name, chain in chains.items():
        # One step more shows whether the recipe ends the other runs where it ended the calm one.
        runs.begin(name, chain, steps if calm.stopped is None else steps + 1)
    proofs: list[Proof] = []

    def add(proof: Proof) -> None:
        proofs.append(proof)
        tell(proof)

    add(gradient_proof(calm.lines[0].gradient))
    usual, ignored = None, frozenset[str]()
    for launch, ended in _in_order(runs, chains):
        if ended is None:
            add(_not_run(launch, "the run before it, which it resumes, did not end as it should"))
            continue
        if launch.proof == AGAIN:
            ignored = unsteady_values(expected, ended.lines)
        difference = first_difference(expected, ended.lines, ignored)
        add(_proof(launch, ended, difference, _other_end(calm, launch, ended)))
        if usual is None and difference is not None:
            usual = cause(launch.proof, difference)
    missing = left_out(steps, shards)
    for each in missing:
        add(_not_run(each.launch, each.reason))
    first_bad = next((each for each in proofs if each.is_bad), None)
    if first_bad is not None and first_bad.proof == GRADIENT:
        usual = cause(GRADIENT, None)
    unproved = [f"{each.launch.proof} ({each.reason})" for each in missing if each.is_gap]
    verdict = _verdict(first_bad, is_whole=not unproved)
    return Checked(
        recipe=options.recipe,
        result=verdict,
        exit_code=EXIT_COMPLETE if verdict is Verdict.EXACT else EXIT_FAILED,
        steps=steps,
        steps_of_run=_steps_of_run(calm),
        proofs=proofs,
        notes=[note for line in calm.lines for note in line.notes],
        ignored=sorted(ignored),
        unproved=unproved,
        not_compared=_not_compared(calm, steps, ends, proofs),
        cause=usual,
    )


def _in_order(runs: Runs, chains: dict[str, list[Launch]]) -> Iterator[tuple[Launch, Ended | None]]:
    """Each launch, once it ended; with None if it was not begun."""
    for name, chain in chains.items():
        for number, launch in enumerate(chain):
            yield launch, runs.end_of(name, number)


def _verdict(first_bad: Proof | None, *, is_whole: bool) -> Verdict:
    if first_bad is not None:
        return Verdict(first_bad.result)
    return Verdict.EXACT if is_whole else Verdict.UNPROVED


def _proof(launch: Launch, ended: Ended, difference: FirstDifference | None, other_end: str | None) -> Proof:
    """other_end: where it ended, if the calm run ended elsewhere."""
    found = Proof(proof=launch.proof, workers=launch.workers, result=Result.EXACT, seconds=ended.seconds)
    if ended.code not in launch.ends:
        expected = f"{_ending(ended)} instead of exit code {launch.ends[0]}"
        words = ended.words or "it said nothing"
        found = replace(found, result=Result.FAILED, ended=expected, failure=words)
    elif other_end is not None:
        found = replace(found, result=Result.FAILED, ended=other_end, failure=_OTHER_END)
    if difference is not None:
        found = replace(found, result=Result.DIFFERS, step=difference.step, entry=difference.entry)
    return found


def _other_end(calm: Ended, launch: Launch, ended: Ended) -> str | None:
    """The end of a run that the recipe ended elsewhere than the calm one, or did not end."""
    if ended.code not in launch.ends or ended.code != EXIT_COMPLETE or not ended.lines:
        return None
    of_calm, found = (max(line.step for line in each.lines) for each in (calm, ended))
    # A run that is only cut short for the check may have trained a step more.
    is_same = found == of_calm if calm.stopped is not None else found >= of_calm
    if is_same and (calm.stopped is None) == (ended.stopped is None):
        return None
    both = ((step, each.stopped is not None) for step, each in ((found, ended), (of_calm, calm)))
    here, there = (
        f"{'ended by the recipe' if is_ended else 'not ended'} after step {step}" for step, is_ended in both
    )
    return f"another end ({here}, the calm run {there})"


def _not_run(launch: Launch, reason: str) -> Proof:
    return Proof(proof=launch.proof, workers=launch.workers, result=Result.NOT_RUN, note=reason)


def _ending(ended: Ended) -> str:
    return f"no end within {LIMIT_S:.0f} s" if ended.code is None else f"exit code {ended.code}"


def _steps_of_run(calm: Ended) -> int:
    return calm.lines[-1].step if calm.stopped is not None else calm.lines[-1].steps


def _epoch_ends(lines: list[TraceLine]) -> frozenset[int]:
    """The steps after which another epoch begins."""
    return frozenset(line.step for line, after in pairwise(lines) if line.epoch != after.epoch)


def _not_compared(calm: Ended, steps: int, ends: frozenset[int], proofs: list[Proof]) -> list[str]:
    """What a check says nothing about, each as a part of a sentence."""
    found = [f"{each.proof} ({each.note})" for each in proofs if each.result is Result.NOT_RUN]
    gradient = calm.lines[0].gradient
    if gradient is not None and gradient.in_eval:
        found.append(f"the first gradient in training mode ({gradient.in_eval})")
    if steps < _steps_of_run(calm):
        found.append(f"the steps after step {steps}{'' if ends else ', and so each epoch after the first'}")
    found.append("files that the recipe writes, and objects outside State that no compared step used")
    return found


def gradient_proof(found: FirstGradient | None) -> Proof:
    """What the first gradient of the calm run shows, which was compared beside it."""
    plain = Proof(proof=GRADIENT, workers=1, result=Result.EXACT)
    if found is None or found.difference is None:
        obstacle = "step 1 was not trained, or without a backward" if found is None else found.obstacle
        return replace(plain, note=obstacle, result=Result.NOT_RUN)
    note = f"{found.difference:.1e} of its norm from that of the whole batch"
    if found.in_eval:
        note += f", both in eval mode: {found.in_eval}"
    if found.difference <= GRADIENT_LIMIT:
        return replace(plain, note=note)
    return replace(plain, result=Result.DIFFERS, step=1, entry=found.parameter, note=note)
