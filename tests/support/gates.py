"""A run provably stands before a step until its test lets it go on; nothing waits for a fixed time.

A gate is a file in a folder that the recipe looks at: tests/process/recipes/tiny.py.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PATIENCE_S = 240.0  # far beyond what any machine needs
POLL_S = 0.02

T = TypeVar("T")


class Gates:
    """`gates`: the folder."""

    gates: Path

    def shut(self, *gates: int | str) -> None:
        for gate in gates:
            (self.gates / f"gate-{gate}").touch()

    def open(self, gate: int | str) -> None:
        (self.gates / f"go-{gate}").touch()

    def stand(self, gate: int | str, ranks: int, since: float = 0.0) -> bool:
        """Whether so many ranks wait at the gate; what an older generation left there is older."""
        paths = [self.gates / f"at-{gate}-rank{rank}" for rank in range(ranks)]
        return all(path.exists() and path.stat().st_mtime >= since for path in paths)


def wait_for(
    condition: Callable[[], T],
    what: str,
    is_over: Callable[[], bool] = lambda: False,
    *,
    within_s: float = PATIENCE_S,
    poll_s: float = POLL_S,
) -> T:
    """The first true value of `condition`.

    Raises TimeoutError after `within_s`, and at once where it can no longer come.
    """
    deadline_s = time.monotonic() + within_s
    while not (value := condition()):
        # Once more: it may have happened just before the end.
        if is_over() and not condition():
            raise TimeoutError(f"expected {what}, but all has ended")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"expected {what} within {within_s:.0f} s, found none")
        time.sleep(poll_s)
    return value
