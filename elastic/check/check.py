"""A recipe is tried as a user would try it: by the command itself, again and again.

Each run is a process of its own, with a run directory in a temporary folder (runs.py), and each one
breaks something else (plan.py). Nothing else is written, unless the recipe writes elsewhere than to
`run.path`. What is compared was written by the workers (train/trace.py).
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from elastic.check.causes import cause
from elastic.check.compare import FirstDifference, averaged_buffers, first_difference, unsteady_values
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
from elastic.check.runs import LIMIT_S, Ended, Runs, signals_as_news
from elastic.config.options import CheckOptions
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_USAGE, ElasticError, UsageError
from elastic.system.trace_line import FirstGradient, TraceLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the steps of one launch showed.

    step, entry: of the first difference from the calm run. failure: how the launch ended, where it
    did not end as it should. note: what a proof shows or leaves open that found no difference.
    ran: false where there was nothing to compare, for the reason in `note`.
    """

    proof: str
    workers: int
    same: bool
    seconds: float
    step: int | None = None
    entry: str | None = None
    failure: str | None = None
    note: str | None = None
    ran: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The fields are the keys of `check --json`.

    steps: how many steps were compared, the first ones, of steps_of_run. ignored: names of logged
    values that differ between two equal commands. not_compared: what the check says nothing about.
    cause: what usually makes the first proof fail that failed, None where its failure says it.
    """

    recipe: str
    same: bool
    steps: int
    steps_of_run: int
    proofs: list[Proof]
    ignored: list[str]
    not_compared: list[str]
    cause: str | None


class RecipeFailed(ElasticError):  # noqa: N818
    """The calm run did not come through: there is nothing to compare."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def check(options: CheckOptions, tell: Callable[[Proof], None]) -> Checked:
    """tell: is given each proof as soon as it is known.

    Raises UsageError or RecipeFailed where the calm run by one worker does not come through, and
    CheckStopped at a signal. In any case its processes and its folder are gone.
    """
    temporary = tempfile.TemporaryDirectory(prefix="elastic-check-", ignore_cleanup_errors=True)
    # Left in the opposite order: the processes go before their folder.
    with signals_as_news() as news, temporary as folder, Runs(options, Path(folder), news) as runs:
        return _check(options, runs, tell)


def _check(options: CheckOptions, runs: Runs, tell: Callable[[Proof], None]) -> Checked:
    least, seconds = (LEAST_STEPS, CALM_SECONDS) if options.steps is None else (options.steps, 0.0)
    runs.begin(CALM, [Launch(proof=CALM, workers=1, gradient=True)], least, seconds)
    calm = runs.end_of(CALM, 0)
    assert calm is not None, "no command is before it"
    if calm.code == EXIT_USAGE:
        raise UsageError(calm.words)
    if calm.code != EXIT_COMPLETE or not calm.lines:
        ended = f"{_ending(calm)} after {len(calm.lines)} steps"
        code = calm.code if calm.code is not None and calm.code > 0 else EXIT_FAILED
        raise RecipeFailed(
            f"{calm.words}\nthe calm run by one worker ended with {ended}; nothing was compared", code
        )
    steps, of_run = max(line.step for line in calm.lines), calm.lines[-1].steps
    note = f"the first {steps} of {of_run} steps, with which the others are compared"
    tell(Proof(proof=CALM, workers=1, same=True, seconds=calm.seconds, note=note))
    return _prove(options, runs, tell, calm.lines)


def _prove(
    options: CheckOptions, runs: Runs, tell: Callable[[Proof], None], calm: list[TraceLine]
) -> Checked:
    expected = {line.step: line for line in calm}
    steps, last = max(expected), calm[-1]
    chains = {str(number): chain for number, chain in enumerate(launches(steps, last.shards))}
    for name, chain in chains.items():
        runs.begin(name, chain, steps)
    proofs: list[Proof] = []

    def add(proof: Proof) -> None:
        proofs.append(proof)
        tell(proof)

    add(gradient_proof(calm[0].gradient))
    usual, ignored = None, frozenset[str]()
    for name, chain in chains.items():
        for number, launch in enumerate(chain):
            ended = runs.end_of(name, number)
            if ended is None:
                continue  # the launch before it failed, and says so
            if launch.proof == AGAIN:
                ignored = unsteady_values(expected, ended.lines)
            difference = first_difference(expected, ended.lines, ignored)
            add(_proof(launch, ended, difference))
            if usual is None and difference is not None:
                usual = cause(launch.proof, difference)
    for proof, reason in left_out(steps, last.shards).items():
        add(Proof(proof=proof, workers=1, same=True, seconds=0.0, note=f"not run: {reason}", ran=False))
    first_bad = next((each for each in proofs if not each.same), None)
    if first_bad is not None and first_bad.proof == GRADIENT:
        usual = cause(GRADIENT, None)
    return Checked(
        recipe=options.recipe,
        same=first_bad is None,
        steps=steps,
        steps_of_run=last.steps,
        proofs=proofs,
        ignored=sorted(ignored),
        not_compared=_not_compared(steps, last.steps, proofs, averaged_buffers(calm)),
        cause=usual,
    )


def _proof(launch: Launch, ended: Ended, difference: FirstDifference | None) -> Proof:
    failure = None
    if ended.code not in launch.ends:
        failure = f"{_ending(ended)} instead of exit code {launch.ends[0]}:\n{ended.words}"
    return Proof(
        proof=launch.proof,
        workers=launch.workers,
        same=difference is None and failure is None,
        seconds=ended.seconds,
        step=None if difference is None else difference.step,
        entry=None if difference is None else difference.entry,
        failure=failure,
    )


def _ending(ended: Ended) -> str:
    return f"no end within {LIMIT_S:.0f} s" if ended.code is None else f"exit code {ended.code}"


def _not_compared(steps: int, of_run: int, proofs: list[Proof], averaged: list[str]) -> list[str]:
    """What a check says nothing about, each as a part of a sentence."""
    found = [f"{each.proof} ({each.note})" for each in proofs if not each.ran]
    if steps < of_run:
        found.append(f"the steps after step {steps}")
    found.append("files that the recipe writes, and objects outside State that no compared step used")
    if averaged:
        found.append(
            f"whether the mean over shards is meant in {', '.join(averaged)} (buffers of floats that a forward changes)"
        )
    return found


def gradient_proof(found: FirstGradient | None) -> Proof:
    """What the first gradient of the calm run shows, which was compared beside it."""
    plain = Proof(proof=GRADIENT, workers=1, same=True, seconds=0.0)
    if found is None or found.difference is None:
        obstacle = "step 1 was not trained, or without a backward" if found is None else found.obstacle
        return replace(plain, note=f"not compared: {obstacle}", ran=False)
    note = f"{found.difference:.1e} of its norm from that of the whole batch"
    if found.difference <= GRADIENT_LIMIT:
        return replace(plain, note=note)
    return replace(plain, same=False, step=1, entry=found.parameter, note=note)
