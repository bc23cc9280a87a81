"""A loop that Python's own functions write holds values where no look can see them: it is refused.

`functools.reduce(f, run.steps(...), start)` keeps its accumulator in compiled code, and what the
function given to `map` keeps is read by no variable of the loop's frame. The text of the expression
that asked for the next step tells it; where there is no text, nothing is refused.
"""

import ast
import linecache
from itertools import islice
from types import FrameType

from elastic.data.own_files import is_own_file
from elastic.errors import UsageError

_CALLS = frozenset({"reduce", "accumulate", "map", "filter", "starmap"})


def check(frame: FrameType | None) -> None:
    """frame: that which asks for the next step, or one that it called. Raises UsageError."""
    while frame is not None and not is_own_file(frame.f_code.co_filename):
        frame = frame.f_back  # this library's own generators are in between
    if frame is not None and (name := _called(_asking(frame))):
        raise UsageError(
            f"the steps of the run are given to {name}(...), which keeps between two steps what no process that restarts has: write the loop as "
            "`for step in run.steps(data, state):`, and keep what it changes in elastic.Values(...), which goes into the State"
        )


def _asking(frame: FrameType) -> str:
    """The text of the expression that is computed, or that a `for` iterates over."""
    positions = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if positions is None or None in positions:
        return ""
    first, last, begin, end = positions
    lines = [
        linecache.getline(frame.f_code.co_filename, number).encode()
        for number in range(first or 0, (last or 0) + 1)
    ]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")


def _called(text: str) -> str:
    """Which of those functions is called with `.steps(...)` among its arguments; empty for none."""
    for made in ast.walk(_iterated(text)):
        if isinstance(made, ast.Call) and any(map(_is_steps, made.args)):
            function = made.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in _CALLS:
                return name
    return ""


def _iterated(text: str) -> ast.AST:
    """Of a whole `for`, which is what some versions of Python point at, what it iterates over."""
    for form in (f"({text})", text):
        try:
            (made,) = ast.parse(form).body
        except (SyntaxError, ValueError):
            continue
        return made.iter if isinstance(made, ast.For) else made
    return ast.Pass()


def _is_steps(node: ast.expr) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(function, ast.Attribute) and function.attr == "steps"
