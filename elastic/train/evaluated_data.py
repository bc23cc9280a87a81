"""What `run.evaluate` is given is the same data set on every rank, and after a resume.

An evaluation may decide what becomes of the state, and a process that restarts makes its data set
again: a split without a generator of its own would be another one. Beside each state stands what
each call was given, by its line in the recipe. The indices of a split, the tensors of a
TensorDataset and targets count (contents.py); what a data set fills while it is read does not. A
line that was given several data sets is not compared, nor one that an edit has moved, nor one that
was run once alone before the state was saved.
"""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from elastic.data.contents import contents_of
from elastic.data.own_files import is_own_file
from elastic.errors import UsageError

_COUNTS = re.compile(r"\.indices$|\.targets$|\.tensors\[\d+\]$")
_SEVERAL = ""
_MANY = 16  # places


def sha256_of(dataset: Any) -> str:
    """16 digits; empty where nothing counts."""
    found = {name: part for name, part in contents_of(dataset).items() if _COUNTS.search(name)}
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16] if found else ""


def place_of_call() -> str:
    """The line of the recipe that is running, such as `recipe.py:41`; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the recipe's is above
    while frame is not None and not is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@dataclass(slots=True, kw_only=True)
class EvaluatedData:
    """Of one process: what each place was given, by a hash, and how often.

    new_run: the command that begins one from the state of this one.
    """

    new_run: str
    _now: dict[str, str] = field(default_factory=dict)
    _calls: Counter[str] = field(default_factory=Counter)
    _there: dict[str, str] = field(default_factory=dict)

    def add(self, place: str, sha256: str) -> None:
        """Raises UsageError for another data set than the run had there, at the first call."""
        if place and sha256:
            self._now[place] = sha256 if self._now.get(place, sha256) == sha256 else _SEVERAL
            self._calls[place] += 1
            if self._calls[place] == 1:
                self._compare(place)

    def resume(self, there: Mapping[str, str]) -> None:
        """there: `saved`, beside the state that the loop begins with. Raises as `add` does."""
        self._there = dict(there)
        for place in self._now:
            self._compare(place)

    def saved(self) -> dict[str, str]:
        """A hash by place, empty for several. One call alone does not tell that all are alike."""
        now = {place: sha256 for place, sha256 in self._now.items() if self._calls[place] > 1}
        several = {place: _SEVERAL for place, sha256 in self._there.items() if sha256 == _SEVERAL}
        return dict(sorted((self._there | now | several).items())[:_MANY])

    def _compare(self, place: str) -> None:
        was, now = self._there.get(place, _SEVERAL), self._now[place]
        if _SEVERAL not in (was, now) and was != now:
            raise UsageError(
                f"run.evaluate ({place}): this data set is another one than the run evaluated there before its state was saved. A process that restarts "
                "must make the same one: give a split a generator of its own (random_split(..., generator=torch.Generator().manual_seed(0))), and "
                f"sort lists of files. To evaluate other data on purpose, begin a new run from this state: {self.new_run}"
            )
