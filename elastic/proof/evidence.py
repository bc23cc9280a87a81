"""What a step left behind, in one form: two computations of it are equal if their evidence is.

Entries stand in the order in which a step computes them: what the first of them that differs names
is the nearest to the cause. It says what differs, and a third computation says more (verdict).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from elastic.system.untrusted import decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Of one step, the same on every rank but for `variables`.

    entries: checksums and numbers as text, by name. wall_s: when the step had ended, in seconds
    since 1970. variables: what the recipe's own variables held then (variables.py), as text.
    unsteady: those that were not the same on all ranks.
    """

    step: int
    generation: int
    world_size: int
    wall_s: float
    entries: dict[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    unsteady: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What is known of a step that is done again: the first computation of it, perhaps a second.

    is_rehearsal: the workers were started anew for the comparison alone.
    """

    is_rehearsal: bool
    found: list[Evidence]

    @property
    def step(self) -> int:
        """0 where nothing is known."""
        return self.found[0].step if self.found else 0


NOTHING = Earlier(is_rehearsal=False, found=[])


class Verdict(Enum):
    ALIKE = "alike"
    UNCLEAR = "unclear"  # a third computation tells more
    ONCE = "once"  # one of three was wrong: a machine, or an algorithm that is not deterministic
    HIDDEN = "hidden"  # the first process had something that new ones lack
    RANDOM = "random"  # no two are alike


def differences(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Names of what differs or is there once, in the order of `first`."""
    names = dict.fromkeys([*first, *second])
    return [name for name in names if first.get(name) != second.get(name)]


def verdict(found: Sequence[Mapping[str, str]]) -> Verdict:
    """Of the entries of two or three computations, the newest last."""
    first, *later = found
    if later[-1] == first:
        return Verdict.ALIKE if len(later) == 1 else Verdict.ONCE
    if len(later) == 1:
        return Verdict.UNCLEAR
    return Verdict.HIDDEN if later[0] == later[1] else Verdict.RANDOM


def write(path: Path, earlier: Earlier) -> None:
    """Raises OSError."""
    path.write_text(json.dumps(asdict(earlier)))


def take(path: Path) -> Earlier:
    """What the generation before left here; it counts once. NOTHING where that cannot be read."""
    try:
        text = path.read_bytes()
        path.unlink()
        return decode(Earlier, text, what="the evidence of a step")
    except (OSError, ValueError):
        return NOTHING
