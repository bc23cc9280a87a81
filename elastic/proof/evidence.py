"""What a computation left behind, in one form: two of them are equal if their evidence is.

Evidence is compared of the states of ranks (agreement.py), a shard that two ranks computed
(audit.py), a step that was done again (step_again.py), and the steps of two runs (check/check.py).
`differences` names what differs. Entries stand in the order in which they are computed: the first
of them that differs is the nearest to the cause.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from elastic.system.untrusted import decode

LOSS = "the loss"
# How the text of a variable begins: it must come back after a restart, or may be only shown.
STATE, SHOWN = "state ", "shown "
CUT = ""  # the name that says that there are more variables than were looked at
MOST_SHOWN = 50


@dataclass(frozen=True, slots=True)
class Evidence:
    """entries: checksums and numbers as text, by name."""

    entries: dict[str, str]

    @property
    def whole(self) -> str:
        """One checksum of all entries, in whichever order they stand: 64 hexadecimal digits."""
        lines = (f"{name} {value}\n" for name, value in sorted(self.entries.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def differences(*found: Evidence) -> list[str]:
    """Names of the entries that are not the same in all, in the order of the first."""
    names = dict.fromkeys(name for each in found for name in each.entries)
    return [name for name in names if len({each.entries.get(name) for each in found}) > 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedStep:
    """A step as one generation computed it, the same on every rank but for `wall_s`.

    wall_s: when it had ended, in seconds since 1970. variables: what the recipe's own variables
    held then (variables.py). unsteady: those that were not the same on all ranks.
    """

    step: int
    generation: int
    world_size: int
    wall_s: float
    evidence: Evidence
    variables: dict[str, str] = field(default_factory=dict)
    unsteady: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """The one or two earlier computations of a step that is done again.

    is_rehearsal: the workers began again for the comparison alone. is_dealt_anew: other ranks
    compute its shards now, in the opposite order.
    """

    is_rehearsal: bool
    found: list[ComputedStep]
    is_dealt_anew: bool = False

    @property
    def step(self) -> int:
        """0 where nothing is known."""
        return self.found[0].step if self.found else 0


NOTHING = Earlier(is_rehearsal=False, found=[])


def with_variables(found: Sequence[ComputedStep]) -> list[Evidence]:
    """The evidence of each computation, with the variables that hold state.

    A variable counts where it is there in all of them, and was the same on all ranks.
    """
    unsteady = {name for each in found for name in each.unsteady}
    held = [
        name
        for name in found[0].variables
        if name not in unsteady and all(each.variables.get(name, "").startswith(STATE) for each in found)
    ]
    return [
        Evidence(each.evidence.entries | {f"the variable {name}": each.variables[name] for name in held})
        for each in found
    ]


def not_restored(first: ComputedStep, second: ComputedStep) -> dict[str, str]:
    """Variables that a restart does not bring back, with both values."""
    texts = first.variables, second.variables
    # A variable that is not there at all cannot be read before it is set again. Where the ranks
    # never agreed it is a rank's own, such as its batch; a best loss that rank 0 alone keeps begins
    # alike.
    there, unsteady = set(map(_variable, texts[1])), {*first.unsteady} & {*second.unsteady}
    differ = differences(*map(Evidence, texts))
    names = [name for name in differ if name not in unsteady and _variable(name) in there]
    if CUT in texts[0] or CUT in texts[1]:  # a missing variable was perhaps not looked at
        names = [name for name in names if name in texts[0] and name in texts[1]]
    # Of a list that is longer than it was, no element says more.
    shown = [name for name in names if f"len({name.rpartition('[')[0]})" not in names]
    # Tensors and counters come first, and numbers with a point, which may be clocks, last.
    shown.sort(key=lambda name: min(_weight(each.get(name, ".")) for each in texts))
    return {
        name: " then, ".join(each.get(name, "nothing").removeprefix(SHOWN) for each in texts) + " now"
        for name in shown[:MOST_SHOWN]
    }


def _weight(text: str) -> int:
    return 0 if text.startswith(STATE) else 1 + ("." in text)


def roots(names: Iterable[str]) -> list[str]:
    """The variables from which these are reached, each once."""
    plain = (name.removeprefix("len(").removesuffix(")") for name in names)
    return list(dict.fromkeys(name.partition("[")[0] for name in plain))


def _variable(name: str) -> str:
    return re.split(r"[.\[)]", name.removeprefix("len(").removeprefix("the place in "))[0]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLine:
    """A step as one generation trained it: a worker writes it for `elastic-train check`.

    steps, shards: of the whole run. entries: the evidence of the step, and what the recipe logged.
    epoch: from 0. notes: what the run said on its console, since
    the line before, about exact results that are perhaps not meant.
    """

    step: int
    generation: int
    world_size: int
    steps: int
    shards: int
    entries: dict[str, str]
    epoch: int = 0
    notes: list[str] = field(default_factory=list)
