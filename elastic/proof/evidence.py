"""What a step left behind, in one form: two computations of it are equal if their evidence is.

Entries stand in the order in which a step computes them: what the first of them that differs names
is the nearest to the cause. It says what differs, and a third computation says more (verdict).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from elastic.system.untrusted import decode

# How the text of a variable begins: it must come back after a restart, or may be only shown.
STATE, SHOWN = "state ", "shown "
CUT = ""  # the name that says that there are more variables than were looked at
MOST_SHOWN = 50


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

    is_rehearsal: the workers were started anew for the comparison alone. is_dealt_anew: other ranks
    compute its shards now, in the opposite order.
    """

    is_rehearsal: bool
    found: list[Evidence]
    is_dealt_anew: bool = False

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


def results(found: Sequence[Evidence], *, with_variables: bool) -> list[dict[str, str]]:
    """Of each computation what must be the same: its entries, and the variables that hold state.

    A variable counts where it is there in all of them, and was the same on all ranks.
    """
    if not with_variables:
        return [each.entries for each in found]
    unsteady = {name for each in found for name in each.unsteady}
    held = [
        name
        for name in found[0].variables
        if name not in unsteady and all(each.variables.get(name, "").startswith(STATE) for each in found)
    ]
    return [each.entries | {f"the variable {name}": each.variables[name] for name in held} for each in found]


def not_restored(first: Evidence, second: Evidence) -> dict[str, str]:
    """Variables that a restart does not bring back, with both values."""
    texts = first.variables, second.variables
    names = dict.fromkeys(differences(*texts))
    if CUT in texts[0] or CUT in texts[1]:  # what is missing was perhaps not looked at
        names = {name: None for name in names if name in texts[0] and name in texts[1]}
    for name in (*first.unsteady, *second.unsteady):
        names.pop(name, None)
    # Of a list that is longer than it was, no element says more.
    shown = [name for name in names if f"len({name.rpartition('[')[0]})" not in names]
    return {
        name: " then, ".join(each.get(name, "nothing").removeprefix(SHOWN) for each in texts) + " now"
        for name in shown[:MOST_SHOWN]
    }


def roots(names: Iterable[str]) -> list[str]:
    """The variables from which these are reached, each once."""
    plain = (name.removeprefix("len(").removesuffix(")") for name in names)
    return list(dict.fromkeys(name.partition("[")[0] for name in plain))


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
