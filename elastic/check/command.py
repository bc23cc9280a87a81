"""What `elastic-train check` prints, a line for each run as soon as it ended, and its exit code."""

import json
from dataclasses import asdict
from pathlib import Path

from elastic.agent import second_loop
from elastic.agent.preflight import imports_library
from elastic.check.check import Checked, Proof, check
from elastic.config.options import CheckOptions
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, UsageError
from elastic.system.untrusted import printable


def run_check(options: CheckOptions) -> int:
    """Check a recipe, print what was found, and return the exit code.

    Raises UsageError for what is no recipe of this library, RecipeFailed where it does not train,
    CheckStopped at a signal.
    """
    if not imports_library(Path(options.recipe)):
        raise UsageError(
            f"expected a recipe that imports elastic, found that {options.recipe} does not: this library keeps no state of such"
            " a script, and there is nothing to compare"
        )
    second_loop.refuse(Path(options.recipe), Path(options.recipe).read_bytes())
    if options.as_json:
        found = check(options, lambda _: None)
        print(json.dumps(asdict(found), indent=2))
    else:
        _say(f"{options.recipe}: its first steps are trained again and again, in a temporary folder")
        found = check(options, lambda proof: _say(row(proof)))
        _say(verdict(found))
    return EXIT_COMPLETE if found.same else EXIT_FAILED


def _say(text: str) -> None:
    print(printable(text), flush=True)


def row(proof: Proof) -> str:
    """One line of what is a table from above."""
    workers = f"{proof.workers} worker{'s' if proof.workers > 1 else ''}" if proof.ran else ""
    seconds = f"{proof.seconds:.1f} s" if proof.seconds else ""
    return f"  {proof.proof:<30}  {workers:<9}  {seconds:>6}  {_result(proof)}"


def _result(proof: Proof) -> str:
    if proof.step is not None:
        differs = f"differs at step {proof.step}: {proof.entry}"
        return differs if proof.note is None else f"{differs}, {proof.note}"
    if proof.failure is not None:
        return proof.failure.splitlines()[0]
    return proof.note or "the same"


def verdict(found: Checked) -> str:
    """Its last line says what was not compared."""
    lines = []
    bad = next((each for each in found.proofs if not each.same), None)
    if bad is None:
        lines.append("exact: every run left the same state behind at every step")
    else:
        if bad.failure is not None:
            lines.append(f"{bad.proof}, {bad.workers} workers: {bad.failure}")
        lines.append("not exact" if found.cause is None else f"not exact: {found.cause}")
    if found.ignored:
        names = ", ".join(found.ignored)
        lines.append(f"not compared, because two equal commands log other values: {names}")
    return "\n".join([*lines, f"not compared: {'; '.join(found.not_compared)}"])
