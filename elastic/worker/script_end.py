"""A script has ended well only once the run that it held agrees.

`elastic.train` adds its run here, which `elastic.worker` must not import. The worker calls
`reached` after the script's last line, also after `sys.exit(0)`. Without an agent the interpreter
calls it at its exit, unless the script failed: an exception that nothing caught, or `sys.exit` with
another code. An exit code that reaches the interpreter by `raise SystemExit` itself is not seen
there.
"""

import sys
from collections.abc import Callable
from typing import NoReturn, Protocol


class HeldRun(Protocol):
    def script_ended(self) -> None:
        """May raise what makes the end of the script a failure."""

    def explain(self, error: BaseException) -> BaseException:
        """The error behind an error that ended the script; the same one if there is none."""


_ends_process: list[Callable[[BaseException], NoReturn]] = []
_runs: list[HeldRun] = []
_exit_codes: list[object] = []
_sys_exit = sys.exit


def add(run: HeldRun) -> None:
    _runs.append(run)


def reached() -> None:
    """Raises what the runs raise."""
    for run in _runs:
        run.script_ended()


def explain(error: BaseException) -> BaseException:
    for run in _runs:
        error = run.explain(error)
    return error


def fail_with(function: Callable[[BaseException], NoReturn]) -> None:
    """How this process ends with an error."""
    _ends_process.append(function)


def fail(error: BaseException) -> NoReturn:
    """End the process with an error from where no exception reaches the script: a finalizer."""
    _ends_process[-1](error)


def watch_exit_codes() -> None:
    """Without an agent: the interpreter tells its exit functions no exit code."""
    sys.exit = _noting_exit


def has_failed() -> bool:
    """Whether the script failed, as far as its interpreter shows."""
    return hasattr(sys, "last_value") or any(code not in (None, 0) for code in _exit_codes)


def exit_code() -> int:
    """That of a script which ends now, as far as its interpreter shows."""
    codes = [code if isinstance(code, int) else 1 for code in _exit_codes if code is not None]
    return codes[-1] if codes else int(has_failed())


def _noting_exit(status: object = None) -> NoReturn:
    _exit_codes.append(status)
    _sys_exit(status)  # type: ignore[arg-type]
