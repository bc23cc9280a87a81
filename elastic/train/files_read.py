"""A file that one step writes and a later one reads is a memory of the loop, and it is named.

No State has it, and it is not as at the top of the script either: a process that goes on from an
earlier state finds in it what a later step wrote, such as best weights that this state has not seen
yet. Watched is what the loop's body opens for reading, as torch.load, json and NumPy do, and whose
last change lies between the beginning of the run and that of the step. What is opened while samples
are loaded or shards computed does not count: that may be a cache. Files that are read by compiled
code (safetensors, a database) or through a descriptor that is kept open are not seen.
"""

import builtins
import io
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from elastic.data.own_files import is_own_file
from elastic.system.clock import file_time_s

TICK_S = 0.02  # a file's time of change may be that much older than the change
MANY_FILES = 32
_FAR = 8  # frames of libraries between the recipe's code and a call of `open`
_NOT_READ = frozenset("wax")
_OF_LOOP = "elastic.train.", "elastic.data."


@dataclass(slots=True, kw_only=True)
class FilesRead:
    """since_s: the time of a file of the run's beginning; infinite where nothing is to count."""

    file_time_s: Callable[[], float] = file_time_s
    since_s: float = math.inf
    _step_s: float = 0.0
    _found: dict[str, bool] = field(default_factory=dict)  # by name, whether it was said

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts, the body of a step runs."""
        self._step_s, before = self.file_time_s(), (builtins.open, io.open)

        def opened(file: Any, mode: str = "r", *args: Any, **settings: Any) -> Any:
            if isinstance(mode, str) and _NOT_READ.isdisjoint(mode):
                self._note(file)
            return before[0](file, mode, *args, **settings)

        builtins.open = io.open = opened
        try:
            yield
        finally:
            if builtins.open is opened:
                builtins.open = before[0]
            if io.open is opened:
                io.open = before[1]

    def new(self) -> list[str]:
        """The names of files that were found since the last call, as the recipe writes them."""
        names = [name for name, is_said in self._found.items() if not is_said]
        self._found.update(dict.fromkeys(names, True))
        return names

    def _note(self, file: Any) -> None:
        if not isinstance(file, (str, os.PathLike)) or len(self._found) >= MANY_FILES:
            return
        with suppress(OSError, ValueError):  # it does not exist, which `open` says
            found = Path(file).stat()
            is_of_earlier_step = self.since_s <= found.st_mtime < self._step_s - TICK_S
            if is_of_earlier_step and stat.S_ISREG(found.st_mode) and _is_from_body():
                self._found.setdefault(str(os.fspath(file)), False)


def _is_from_body() -> bool:
    """Whether the recipe's code opens it, and neither loads samples nor computes a shard."""
    frame: FrameType | None = sys._getframe(3)  # noqa: SLF001 - of the caller of `open`
    is_of_recipe, distance = False, 0
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_OF_LOOP):
            return False
        is_of_recipe = is_of_recipe or (distance <= _FAR and is_own_file(frame.f_code.co_filename))
        frame, distance = frame.f_back, distance + 1
    return is_of_recipe
