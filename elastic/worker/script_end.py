"""A script has ended well only once the run that it held agrees.

`elastic.train` adds its run here, which `elastic.worker` must not import. The worker calls
`reached` after the script's last line, also after `sys.exit(0)`. Without an agent the interpreter
calls it at its exit, unless the script failed: an exception that nothing caught, or `sys.exit` with
another code. An exit code that reaches the interpreter by `raise SystemExit` itself is not seen
there.
"""

import sys
from collections.abc import Callable
from traceback import extract_tb
from types import TracebackType
from typing import NoReturn, Protocol

from elastic.worker.preload import is_installed

_TORCH = "/torch/distributed/"  # its decorators stand between
OWN_GROUP = (
    "expected a recipe without init_process_group, found a call of it; leave it out: "
    "elastic.start opens the process groups that it needs"
)


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


def own_line(trace: TracebackType | None) -> str:
    """The innermost line of the user's own code, with its file; empty where there is none.

    For errors of this library, whose sentence says it: its own frames, and torch's,
    would only hide the line to change. trace: from any frame before it on.
    """
    own = [frame for frame in extract_tb(trace) if _is_own(frame.filename)]
    return f"  at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


def opens_group(trace: TracebackType | None) -> bool:
    """Whether the user's own code called the torch.distributed.init_process_group that failed.

    Before `elastic.start` torch only says which of its variables is missing.
    """
    stack = extract_tb(trace)
    calls = [number for number, frame in enumerate(stack) if frame.name == "init_process_group"]
    callers = [frame.filename for frame in stack[: min(calls, default=0)] if _TORCH not in frame.filename]
    return bool(callers) and _is_own(callers[-1])


def _is_own(filename: str) -> bool:
    return not filename.startswith("<") and not is_installed(filename)
