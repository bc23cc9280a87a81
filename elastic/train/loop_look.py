"""One look at what the loop can reach and no State saves, and how it compares with the one before.

What is new is no change by itself: it may be made when it was first needed, also by a process that
begins again. What an object of the State keeps under another name is saved.
"""

import re
from dataclasses import dataclass, field

from torch import Tensor

from elastic.train import process_settings
from elastic.train.object_marks import ChosenTensor, Kind, Mark
from elastic.train.saved_leaves import SavedLeaves, SavedNumbers, holds_values
from elastic.train.words import plain_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """passed: the number of steps that were done when it was taken. unreadable: see Walk."""

    passed: int
    marks: dict[str, Mark]
    saved: dict[str, SavedNumbers]
    leaves: SavedLeaves
    read: set[str]
    process: process_settings.Settings
    after_loop: list[str]
    read_by_loading: set[str] = field(default_factory=set)
    set_first: set[str] = field(default_factory=set)
    unreadable: dict[str, str] = field(default_factory=dict)


def is_read(path: str, names: set[str]) -> bool:
    """Whether it is one of these variables, or an item or attribute of one that is read.

    names: as LoopVariables.read_by_loading.
    """
    _, dot, attribute = path.rpartition(".")
    is_below = any(path.startswith((f"{name}.", f"{name}[")) for name in names)
    return path in names or (is_below and (not dot or dot + attribute.partition("[")[0] in names))


def is_made_late(path: str, mark: Mark, before: Look, began: int) -> bool:
    """Whether a variable that was None, or a module, has got it after the first step.

    What is made in a process's first step is made when it is first needed, also by the next one.
    Entries that come into a dict may be a cache's.
    """
    former = before.marks.get(path)
    if before.passed <= began or mark.entry or (former is not None and former.kind is not Kind.PLAIN):
        return False
    if mark.owner == "module" or former is not None:
        return True
    places = (path[: found.start()] for found in reversed(list(re.finditer(r"[.\[]", path))))
    above = next((before.marks[place] for place in places if place in before.marks), None)
    return above is not None and above.value == plain_text(None)


def is_added(path: str, mark: Mark, before: Look) -> bool:
    """Whether it is a number or the like that an object has got, which was there before.

    As in `if not hasattr(self, "first"): self.first = loss`.
    """
    if mark.kind is not Kind.PLAIN or path in before.marks or isinstance(mark.value, ChosenTensor):
        return False
    owner, dot, name = path.rpartition(".")
    return bool(dot and name.isidentifier() and owner in before.marks)


def is_saved(path: str, mark: Mark, before: Look, now: Look) -> bool:
    """Whether the state_dict of the object that holds it has it, by name or by its contents."""
    known, earlier = now.saved.get(mark.entry), before.saved.get(mark.entry)
    if known is None or earlier is None:
        return False
    names = [each.strip("_") for each in re.findall(r"[A-Za-z_]\w*", path[len(mark.entry) :])]
    if now.leaves.keys(mark.entry).intersection(names[-1:] if known.is_module else names):
        return True
    former = before.marks.get(path)
    if mark.kind in (Kind.PLAIN, Kind.ARRAY) and former is not None and not known.is_module:
        return all(
            value in its.numbers or value in its.contents
            for value, its in ((mark.value, known), (former.value, earlier))
        )
    thing = None if mark.anchor is None else mark.anchor()
    if isinstance(thing, Tensor):
        return holds_values(known, now.leaves.tensors(mark.entry), thing.detach())
    return False
