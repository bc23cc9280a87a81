"""Of an error's traceback, the lines of the user's own code are what a person looks for.

They are the lines that lie neither in this library nor among what is installed.
"""

from pathlib import Path
from sysconfig import get_path
from traceback import extract_tb
from types import TracebackType

_INSTALLED = tuple(f"{get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_LIBRARY = f"{Path(__file__).parents[1]}/"
_TORCH = "/torch/distributed/"  # its decorators stand between
OWN_GROUP = (
    "expected a recipe without init_process_group, found a call of it; leave it out: "
    "elastic.start opens the process groups that it needs"
)


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
