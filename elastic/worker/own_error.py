"""An exception is the program's own if nothing outside of the program can have caused it.

Such an exception comes back when the same steps are done again, and its agent then stops trying.
What may go away by itself must never be taken for one, so this is a list of what cannot: the
classes that Python and torch raise for what a program does. Failures of files, networks, memory and
devices have classes of their own, as do injected faults and the errors of other libraries; where
torch raises a RuntimeError for one, its message tells.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from sysconfig import get_path
from traceback import extract_tb
from types import TracebackType

from elastic.system.worker_error import ErrorPlace, RaisedError

# Of Python's own classes. FileExistsError: of what an earlier start of the script has made.
_OF_PROGRAMS = re.compile(
    r"builtins\.((Arithmetic|Assertion|Attribute|FileExists|FloatingPoint|Index|Key|Lookup|ModuleNotFound|Name|NotImplemented"
    r"|Overflow|Runtime|Type|UnboundLocal|Value|ZeroDivision)Error)"
)
_OF_MACHINES = re.compile(
    r"memory|bad_alloc|CUDA|CUDNN|CUBLAS|NCCL|HIP|gloo|DataLoader worker|connect|socket|network|broken pipe|time(d )?-?out"
    r"|temporar|unavailable|open files|space left|input/output",
    re.IGNORECASE,
)
# A tensor on the wrong device is the program's mistake, although its message names a GPU.
_WRONG_DEVICE = re.compile(r"same device|cuda:\d")

_INSTALLED = tuple(f"{get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_LIBRARY = f"{Path(__file__).parents[1]}/"
_TORCH = "/torch/distributed/"  # its decorators stand between
OWN_GROUP = (
    "expected a recipe without init_process_group, found a call of it; leave it out: "
    "elastic.start opens the process groups that it needs"
)


def describe(error: BaseException, trace: TracebackType | None, place: ErrorPlace) -> RaisedError | None:
    """None for an error that a restart may mend. trace: from the recipe's outermost line on."""
    if not all(_is_of_program(each) for each in _chain(error)):
        return None
    stack = extract_tb(trace)
    own = [frame for frame in stack if frame.filename == stack[0].filename]
    line = f"{own[-1].filename}:{own[-1].lineno}" if own else ""
    return RaisedError(kind=type(error).__name__, message=str(error), line=line, place=place)


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
    return not filename.startswith(("<", _LIBRARY, *_INSTALLED))


def _is_of_program(error: BaseException) -> bool:
    # Exactly of these classes: a subclass says more, and may be about the network.
    words = _WRONG_DEVICE.sub("", str(error))
    is_known = _OF_PROGRAMS.fullmatch(f"{type(error).__module__}.{type(error).__name__}") is not None
    return is_known and _OF_MACHINES.search(words) is None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and all that it was raised from, or while handling."""
    left, seen = [error], set[int]()
    while left:
        each = left.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [behind for behind in (each.__cause__, each.__context__) if behind is not None]
