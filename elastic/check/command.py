"""The table that `elastic-train check` prints, or its JSON, and its exit code."""

import json
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic.agent.preflight import imports_library
from elastic.check.check import Checked, Proof, check
from elastic.config.options import CheckOptions
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, UsageError
from elastic.system.untrusted import printable


def run_check(options: CheckOptions) -> int:
    """Check a recipe, print what was found, and return the exit code.

    Raises UsageError for what is no recipe of this library, RecipeFailed where it does not train.
    """
    if not imports_library(Path(options.recipe)):
        raise UsageError(
            f"expected a recipe that imports elastic, found that {options.recipe} does not: this library keeps no state of such"
            " a script, and there is nothing to compare"
        )
    found = check(options)
    if options.as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        console = Console(highlight=False)
        console.print(_table(found))
        console.print(Text(printable(_verdict(found))), soft_wrap=True)
    return EXIT_COMPLETE if found.same else EXIT_FAILED


def _table(found: Checked) -> Table:
    title = f"{found.recipe}: the first {found.steps} of {found.steps_of_run} steps, compared with a calm run by one worker"
    table = Table(
        title=Text(printable(title)), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in ("run", "workers", "seconds", "result"):
        table.add_column(column)
    for each in found.proofs:
        seconds = f"{each.seconds:.1f}" if each.seconds else ""
        table.add_row(each.proof, str(each.workers), seconds, Text(printable(_result(each))))
    return table


def _result(proof: Proof) -> str:
    if proof.step is not None:
        differs = f"differs at step {proof.step}: {proof.entry}"
        return differs if proof.note is None else f"{differs}, {proof.note}"
    if proof.failure is not None:
        return proof.failure.splitlines()[0]
    return proof.note or "the same"


def _verdict(found: Checked) -> str:
    lines = []
    if found.ignored:
        names = ", ".join(found.ignored)
        lines.append(f"not compared, because two equal commands log other values: {names}")
    bad = next((each for each in found.proofs if not each.same), None)
    if bad is None:
        return "\n".join([*lines, "exact: every run left the same state behind at every step"])
    if bad.failure is not None:
        lines.append(f"{bad.proof}, {bad.workers} workers: {bad.failure}")
    return "\n".join([*lines, f"not exact: {found.cause}"])
