"""A fault plan is a text that says what breaks when; it is read into values or refused with the line that is wrong.

One fault a line (or separated by semicolons), `#` begins a comment:

    step 40 rank 1: kill                      SIGKILL to itself, before the forward pass of step 40
    step 40 rank 1 mid-sum: raise             an exception instead; points: forward, backward, mid-sum, optimizer,
                                              snapshot (only where one is taken)
    step 40: exit 3                           without a rank: rank 0
    checkpoint 40 upload: kill uploader       while the payload of step 40's checkpoint is stored; or before-commit, after-commit

Each fault strikes once in a run, however often its step is trained again.
"""

import re
from dataclasses import dataclass
from enum import Enum

from elastic.errors import UsageError


class Deed(Enum):
    KILL = "kill"
    RAISE = "raise"
    EXIT = "exit"


STEP_POINTS = ("forward", "backward", "mid-sum", "optimizer", "snapshot")
SAVE_POINTS = ("upload", "before-commit", "after-commit")
STEP = re.compile(r"step (\d+)(?: rank (\d+))?(?: (\S+))?: (kill|raise|exit (\d+))")
SAVE = re.compile(r"checkpoint (\d+) (\S+): kill uploader")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`rank` is None for a fault of the uploader."""

    index: int  # place in the plan, from 0: its name in the run directory
    text: str
    step: int
    rank: int | None
    point: str
    deed: Deed
    code: int = 0


def parse(text: str) -> tuple[Fault, ...]:
    """Raises UsageError that names the line."""
    lines = [part.strip() for line in text.splitlines() for part in line.split("#")[0].split(";")]
    return tuple(_fault(i, " ".join(line.split())) for i, line in enumerate(filter(None, lines)))


def _fault(index: int, line: str) -> Fault:
    if found := STEP.fullmatch(line):
        step, rank, point, deed, code = found.groups()
        point = point or STEP_POINTS[0]
        if point in STEP_POINTS:
            return Fault(
                index=index,
                text=line,
                step=int(step),
                rank=int(rank or 0),
                point=point,
                deed=Deed(deed.split()[0]),
                code=int(code or 0),
            )
    if (found := SAVE.fullmatch(line)) and found[2] in SAVE_POINTS:
        return Fault(index=index, text=line, step=int(found[1]), rank=None, point=found[2], deed=Deed.KILL)
    raise UsageError(
        f"fault plan: expected 'step N [rank R] [{'|'.join(STEP_POINTS)}]: kill|raise|exit C' or "
        f"'checkpoint N {'|'.join(SAVE_POINTS)}: kill uploader', found {line!r}"
    )
