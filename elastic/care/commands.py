"""A command of everyday care does what its words ask for, and says in one sentence what it did."""

from collections.abc import Callable, Sequence

from elastic.care.export import export
from elastic.config.care_options import EXPORT, parse_export
from elastic.errors import EXIT_COMPLETE, UsageError
from elastic.system.clock import SystemClock
from elastic.system.untrusted import printable


def care(command: str, words: Sequence[str]) -> int:
    """words: those behind the command. Returns the exit code; raises UsageError, StoreFailed."""
    try:
        return _COMMANDS[command](words)
    except OSError as error:
        raise UsageError(f"expected files that can be read, found: {error}; try again") from error


def _export(words: Sequence[str]) -> int:
    print(printable(export(parse_export(words), SystemClock())))
    return EXIT_COMPLETE


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {EXPORT: _export}
