"""A command of everyday care does what its words ask for, and prints what it found or did.

Each imports what it needs when it runs: the others start sooner.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Console

from elastic.config.care_options import EXPORT, RUNS, parse_export, parse_runs
from elastic.errors import EXIT_COMPLETE, UsageError
from elastic.system.clock import SystemClock
from elastic.system.untrusted import printable


def care(command: str, words: Sequence[str]) -> int:
    """words: those behind the command. Returns the exit code; raises UsageError, StoreFailed."""
    try:
        return _COMMANDS[command](words)
    except OSError as error:
        raise UsageError(f"expected files that can be read, found: {error}; try again") from error


def _runs(words: Sequence[str]) -> int:
    from elastic.report.runs import list_runs
    from elastic.report.tables import runs_table

    options = parse_runs(words)
    found = list_runs(options.folder, SystemClock())
    if options.as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        Console(highlight=False).print(runs_table(found), soft_wrap=True)
    return EXIT_COMPLETE


def _export(words: Sequence[str]) -> int:
    from elastic.care.export import export

    print(printable(export(parse_export(words), SystemClock())))
    return EXIT_COMPLETE


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {RUNS: _runs, EXPORT: _export}
