"""A command of everyday care does what its words ask for, and prints what it found or did.

Each imports what it needs when it runs: the others start sooner.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Console

from elastic.care.leftovers import Leftover
from elastic.config.care_options import (
    CLEAN,
    COMPLETION,
    EXPORT,
    RUNS,
    parse_clean,
    parse_completion,
    parse_export,
    parse_runs,
)
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, UsageError
from elastic.system import interrupt
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


def _clean(words: Sequence[str]) -> int:
    from elastic.care.clean import clean

    options = parse_clean(words)
    if not options.yes and not options.as_json and not sys.stdin.isatty():
        raise UsageError(
            "expected a terminal to ask on, found none; give --yes, or --json for the list alone"
        )
    interrupt.raise_from_here()  # the lease is given back
    try:
        found = clean(
            RunDir.parse(options.run),
            SystemClock(),
            agrees=(lambda _files: options.yes) if options.yes or options.as_json else _asks,
            notify=lambda line: print(printable(line), file=sys.stderr),
        )
    except KeyboardInterrupt:
        print("elastic-train: interrupted; what is gone by now, no finished run needs", file=sys.stderr)
        return interrupt.EXIT_CTRL_C
    if options.as_json:
        print(json.dumps(asdict(found), indent=2))
    elif not found.files:
        print(printable(f"{found.run}: a finished run with nothing that it does not need"))
    else:
        gone = f"{found.removed} of {len(found.files)} files were removed"
        print(printable(f"{found.run}: {gone}; checkpoints, metrics, events and the newest logs stay"))
    return EXIT_COMPLETE


def _asks(files: Sequence[Leftover]) -> bool:
    for each in files:
        print(printable(f"{each.size_bytes:>14,} bytes  {each.name}  ({each.what})"))
    total = sum(each.size_bytes for each in files)
    print(f"remove these {len(files)} files, {total:,} bytes in all? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _export(words: Sequence[str]) -> int:
    from elastic.care.export import export

    print(printable(export(parse_export(words), SystemClock())))
    return EXIT_COMPLETE


def _completion(words: Sequence[str]) -> int:
    from elastic.care.completion import script

    print(script(parse_completion(words)), end="")
    return EXIT_COMPLETE


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    RUNS: _runs,
    CLEAN: _clean,
    EXPORT: _export,
    COMPLETION: _completion,
}
