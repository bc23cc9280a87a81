"""What `elastic-train check` prints, a line for each run as soon as it ended, and its exit code."""

import json
from dataclasses import asdict
from pathlib import Path

from elastic.agent.preflight import imported_first
from elastic.check.check import Checked, Proof, Result, check
from elastic.config.options import CheckOptions
from elastic.errors import EXIT_USAGE, ElasticError, UsageError
from elastic.system.untrusted import printable

REASON_LIMIT = 200  # characters of a row; the whole error of the first failure follows the table


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
            print(_document(broken_off))
        raise
    print(_document(found) if options.as_json else printable(verdict(found)), flush=True)
    return found.exit_code


def _document(found: Checked) -> str:
    return json.dumps(asdict(found), indent=2)


def _say(text: str) -> None:
    print(printable(text), flush=True)


def row(proof: Proof) -> str:
    """One line of the table from above."""
    workers, seconds = f"{proof.workers} worker{'s' * (proof.workers > 1)}", f"{proof.seconds:.1f} s"
    return f"  {proof.proof:<30}  {workers:<9}  {seconds:>6}  {_result(proof)}"


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
        lines.append(f"{last.proof}, {last.workers} workers: {last.ended}:\n{last.failure}")
    lines.append(_conclusion(found))
    if found.ignored:
        names = ", ".join(found.ignored)
        lines.append(f"not compared, because two equal commands log other values: {names}")
    return "\n".join([*lines, f"not compared: {'; '.join(found.not_compared)}"])


def _conclusion(found: Checked) -> str:
    if found.result is not Result.EXACT:
        return "not exact" if found.cause is None else f"not exact: {found.cause}"
    return f"exact: every run left the same state behind at each of the {found.steps} steps"
