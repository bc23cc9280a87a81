"""A recipe is tried as a user would try it: by the command itself, again and again.

Each run is a process of its own, with a run directory in a temporary folder (runs.py), and each one
breaks something else (plan.py). Nothing else is written, unless the recipe writes elsewhere than to
`run.path`. The first step and entry that differ from the calm run are found in what the workers
wrote (train/loop/build.py).

docs/operations.md describes `check --json`, whose keys are the fields of `Checked` and `Proof`:
change them together.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from elastic.agent.preflight import imported_first
from elastic.check import plan
from elastic.check.runs import LIMIT_S, Ended, none_outlives, run
from elastic.config.options import CheckOptions
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_USAGE, ElasticError, UsageError
from elastic.proof.evidence import Evidence, TraceLine, differences
from elastic.system.files import scratch_folder
from elastic.system.untrusted import printable

_LOGGED = "step.log("  # how the entry of a logged value begins
_OTHER_END = (
    "what ends the loop is of one process alone, such as a counter or a clock: decide by step.number, the loss that step.mean_loss returns, "
    "run.evaluate or elastic.Values, or give run.data(steps=...)"
)
REASON_LIMIT = 200  # characters of a row; the whole error of the first failure follows the table


class RecipeFailed(ElasticError):  # noqa: N818
    """The calm run did not come through: there is nothing to compare."""


class Result(StrEnum):
    """The outcome of one proof, or of the whole check."""

    EXACT = "exact"
    DIFFERS = "differs"
    FAILED = "failed"
    REFUSED = "refused"  # of a check


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the steps of one launch showed.

    seconds: how long the launch took. step, entry: of the first difference from the calm run.
    ended: how the launch ended, where that is not how it should; failure: why, in the words of the
    recipe or of the command. note: what else is to be said.
    """

    proof: str
    workers: int
    result: Result
    seconds: float = 0.0
    step: int | None = None
    entry: str | None = None
    ended: str | None = None
    failure: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """steps: how many steps were compared, the first ones, of steps_of_run.

    notes: what the calm run said that is exact and perhaps not meant. ignored: names of logged
    values that differ between two equal commands. not_compared: what the check says nothing about.
    cause: what usually makes the last proof differ, None unless it differs.
    error: why nothing was compared, or no more, None where all was.
    """

    recipe: str
    result: Result
    exit_code: int
    steps: int = 0
    steps_of_run: int = 0
    proofs: list[Proof] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    cause: str | None = None
    error: str | None = None


def check(options: CheckOptions, tell: Callable[[Proof], None]) -> Checked:
    """tell: is given each proof as soon as it is known.

    Raises UsageError or RecipeFailed where the calm run by one worker does not come through. In any
    case its processes and its folder are gone.
    """
    # Left in the opposite order: the processes go before their folder.
    with scratch_folder("check-") as folder, none_outlives():
        calm = _calm(options, folder)
        steps, of_run = calm.lines[-1].step, _steps_of_run(calm)
        note = f"the first {steps} of {of_run} steps, with which the others are compared"
        if calm.stopped is not None:
            note = f"all {steps} steps, after which the recipe ends the run ({calm.stopped})"
        tell(Proof(proof=plan.CALM, workers=1, result=Result.EXACT, seconds=calm.seconds, note=note))
        return _prove(options, folder, tell, calm)


def _calm(options: CheckOptions, root: Path) -> Ended:
    least, seconds = (plan.LEAST_STEPS, plan.CALM_SECONDS) if options.steps is None else (options.steps, 0.0)
    calm = run(options, root, plan.Launch(proof=plan.CALM, workers=1), least, seconds)
    if calm.code == EXIT_USAGE:
        raise UsageError(calm.words)
    if calm.code != EXIT_COMPLETE or not calm.lines:
        advice = "" if calm.code is not None else "; give it less data or a smaller model"
        if calm.code is None and len(calm.lines) >= plan.LEAST_STEPS // 2:
            advice = f"; --steps {plan.LEAST_STEPS // 2} compares fewer steps"
        raise RecipeFailed(
            f"{calm.words}\nthe calm run by one worker ended with {_ending(calm)} after {len(calm.lines)} steps; nothing was compared{advice}"
        )
    if len(calm.lines) < plan.FEWEST_STEPS:
        raise RecipeFailed(
            f"expected a recipe of {plan.FEWEST_STEPS} steps or more, found {len(calm.lines)}, which leave none between a beginning and a resume; "
            "give it more data or epochs"
        )
    return calm


def _prove(options: CheckOptions, root: Path, tell: Callable[[Proof], None], calm: Ended) -> Checked:
    """The first proof that fails is the last one: what it shows is to be mended first."""
    expected = {line.step: line for line in calm.lines}
    steps = max(expected)
    # After which another epoch begins.
    ends = frozenset(line.step for line, after in pairwise(calm.lines) if line.epoch != after.epoch)
    # One step more shows whether the recipe ends the other runs where it ended the calm one.
    most = steps if calm.stopped is None else steps + 1
    planned = plan.launches(steps, calm.lines[-1].shards, ends)
    proofs: list[Proof] = []
    ignored = frozenset[str]()
    for launch in planned:
        ended = run(options, root, launch, most)
        if launch.proof == plan.AGAIN:
            ignored = unsteady_values(expected, ended.lines)
        proofs.append(_proof(launch, ended, calm, first_difference(expected, ended.lines, ignored)))
        tell(proofs[-1])
        if proofs[-1].result is not Result.EXACT:
            break
    last = proofs[-1]
    return Checked(
        recipe=options.recipe,
        result=last.result,
        exit_code=EXIT_COMPLETE if last.result is Result.EXACT else EXIT_FAILED,
        steps=steps,
        steps_of_run=_steps_of_run(calm),
        proofs=proofs,
        notes=[note for line in calm.lines for note in line.notes],
        ignored=sorted(ignored),
        not_compared=_not_compared(calm, steps, ends, planned[len(proofs) :]),
        cause=plan.USUAL_CAUSE[last.proof] if last.result is Result.DIFFERS else None,
    )


def _proof(launch: plan.Launch, ended: Ended, calm: Ended, difference: tuple[int, str] | None) -> Proof:
    found = Proof(proof=launch.proof, workers=launch.workers, result=Result.EXACT, seconds=ended.seconds)
    if ended.code != launch.code:
        other = f"{_ending(ended)} instead of exit code {launch.code}"
        words = ended.words or "it said nothing"
        found = replace(found, result=Result.FAILED, ended=other, failure=words)
    elif ended.code == EXIT_COMPLETE and ended.lines and not _ends_alike(calm, ended):
        other = f"another end ({_end(ended)}, the calm run {_end(calm)})"
        found = replace(found, result=Result.FAILED, ended=other, failure=_OTHER_END)
    if difference is not None:
        found = replace(found, result=Result.DIFFERS, step=difference[0], entry=difference[1])
    return found


def _ends_alike(calm: Ended, ended: Ended) -> bool:
    """Whether the recipe ended both at one step, or neither."""
    of_calm, found = (max(line.step for line in each.lines) for each in (calm, ended))
    # A run that is only cut short for the check may have trained a step more.
    is_same = found == of_calm if calm.stopped is not None else found >= of_calm
    return is_same and (calm.stopped is None) == (ended.stopped is None)


def _end(ended: Ended) -> str:
    last = max(line.step for line in ended.lines)
    return f"{'not ended' if ended.stopped is None else 'ended by the recipe'} after step {last}"


def _ending(ended: Ended) -> str:
    return f"no end within {LIMIT_S:.0f} s" if ended.code is None else f"exit code {ended.code}"


def _steps_of_run(calm: Ended) -> int:
    return calm.lines[-1].step if calm.stopped is not None else calm.lines[-1].steps


def _not_compared(calm: Ended, steps: int, ends: frozenset[int], left: list[plan.Launch]) -> list[str]:
    """What a check says nothing about, each as a part of a sentence. left: what was not run."""
    found = [f"the run of {each.proof}" for each in left]
    if steps < _steps_of_run(calm):
        found.append(f"the steps after step {steps}{'' if ends else ', and so each epoch after the first'}")
    found.append(
        "the gradient with that of the whole batch in plain PyTorch, files that the recipe writes, and objects outside State that no compared step used"
    )
    return found


def first_difference(
    expected: Mapping[int, TraceLine], found: Sequence[TraceLine], ignored: Collection[str] = ()
) -> tuple[int, str] | None:
    """The first step, and its first entry, that is not as expected; None where all are.

    A step that was trained twice, because a fault cost it, has two lines. ignored: names of logged
    values that are not compared.
    """
    for line in sorted(found, key=lambda line: line.step):
        for name in _names(expected, line):
            if _logged_name(name) not in ignored:
                return line.step, name
    return None


def unsteady_values(expected: Mapping[int, TraceLine], again: Sequence[TraceLine]) -> frozenset[str]:
    """Names of logged values that two equal commands logged differently, as seconds are."""
    names = (_logged_name(name) for line in again for name in _names(expected, line))
    return frozenset(name for name in names if name)


def _names(expected: Mapping[int, TraceLine], line: TraceLine) -> list[str]:
    """A later generation may train beyond the steps that are compared, never the calm run."""
    if line.step not in expected:
        return []
    return differences(Evidence(expected[line.step].entries), Evidence(line.entries))


def _logged_name(entry: str) -> str:
    """Empty for what was not logged."""
    return entry.removeprefix(_LOGGED).removesuffix("=...)") if entry.startswith(_LOGGED) else ""


def run_check(options: CheckOptions) -> int:
    """Check a recipe, print what was found, and return the exit code.

    Raises UsageError for anything but a recipe of this library, and RecipeFailed where it does not
    train. With --json one document is printed in these cases too.
    """
    told: list[Proof] = []

    def tell(proof: Proof) -> None:
        told.append(proof)
        if not options.as_json:
            _say(row(proof))

    if not options.as_json:
        _say(f"{options.recipe}: its first steps are trained again and again, in a temporary folder")
    try:
        if imported_first(Path(options.recipe)) is None:
            raise UsageError(
                f"expected a recipe that imports elastic, found that {options.recipe} does not, so that nothing can be compared"
            )
        found = check(options, tell)
    except ElasticError as error:
        if options.as_json:
            result = Result.REFUSED if error.exit_code == EXIT_USAGE else Result.FAILED
            code, why = error.exit_code, str(error)
            broken_off = Checked(recipe=options.recipe, result=result, exit_code=code, proofs=told, error=why)
            print(json.dumps(asdict(broken_off), indent=2))
        raise
    _say(json.dumps(asdict(found), indent=2) if options.as_json else verdict(found))
    return found.exit_code


def _say(text: str) -> None:
    print(printable(text), flush=True)


def row(proof: Proof) -> str:
    """The line that is printed when a launch has ended."""
    seconds = f"{proof.seconds:.1f} s"
    return f"  {proof.proof:<30}  {_workers(proof):<9}  {seconds:>6}  {_result(proof)}"


def _workers(proof: Proof) -> str:
    return f"{proof.workers} worker{'s' * (proof.workers > 1)}"


def _result(proof: Proof) -> str:
    match proof.result:
        case Result.DIFFERS:
            failed = "" if proof.failure is None else f"; {_failed(proof)}"
            return f"DIFFERS at step {proof.step}, in {proof.entry}{failed}"
        case Result.FAILED:
            return _failed(proof)
        case _:
            return proof.note or "exact"


def _failed(proof: Proof) -> str:
    """With the last line of a traceback, or the first one of a sentence."""
    lines = (proof.failure or "").splitlines()
    reason = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    cut = reason if len(reason) <= REASON_LIMIT else f"{reason[:REASON_LIMIT]} ..."
    return f"FAILED with {proof.ended}: {cut}"


def verdict(found: Checked) -> str:
    """Its last line says what was not compared."""
    lines = [f"note: {note.removeprefix('note: ')}" for note in found.notes]
    last = found.proofs[-1]
    if last.failure is not None:
        lines.append(f"{last.proof}, {_workers(last)}: {last.ended}:\n{last.failure}")
    lines.append(_conclusion(found))
    if found.ignored:
        names = ", ".join(found.ignored)
        lines.append(f"not compared, because two equal commands log other values: {names}")
    return "\n".join([*lines, f"not compared: {'; '.join(found.not_compared)}"])


def _conclusion(found: Checked) -> str:
    if found.result is not Result.EXACT:
        return "not exact" if found.cause is None else f"not exact: {found.cause}"
    return f"exact: every run left the same state behind at each of the {found.steps} steps"
