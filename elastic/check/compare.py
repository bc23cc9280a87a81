"""The first step and entry that differ are found from the evidence that two runs wrote."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastic.proof.evidence import LOSS, Evidence, differences
from elastic.system.trace_line import TraceLine

_LOGGED = "step.log("  # how the entry of a logged value begins


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """step: the first one that differs. entry: of its evidence.

    has_same_loss: that of the step, which is computed before its update. is_logged_alone: of all
    that is compared only a logged value differs.
    """

    step: int
    entry: str
    has_same_loss: bool
    is_logged_alone: bool


def first_difference(
    expected: Mapping[int, TraceLine], found: Sequence[TraceLine], ignored: Collection[str] = ()
) -> FirstDifference | None:
    """The first line of `found`, in the order of the steps, that is not as expected.

    A step that was trained twice, because a fault cost it, has two lines. ignored: names of logged
    values that are not compared.
    """
    for line in sorted(found, key=lambda line: line.step):
        # A later generation may train beyond the steps that are compared, never the calm run.
        names = _names(expected, line)
        if different := [name for name in names if _logged_name(name) not in ignored]:
            return FirstDifference(
                step=line.step,
                entry=different[0],
                has_same_loss=LOSS not in names,
                is_logged_alone=all(name.startswith(_LOGGED) for name in different),
            )
    return None


def unsteady_values(expected: Mapping[int, TraceLine], again: Sequence[TraceLine]) -> frozenset[str]:
    """Names of logged values that two equal commands logged differently, as seconds are."""
    names = (_logged_name(name) for line in again for name in _names(expected, line))
    return frozenset(name for name in names if name)


def _names(expected: Mapping[int, TraceLine], line: TraceLine) -> list[str]:
    if line.step not in expected:
        return []
    return differences(Evidence(expected[line.step].entries), Evidence(line.entries))


def _logged_name(entry: str) -> str:
    """Empty for what was not logged."""
    return entry.removeprefix(_LOGGED).removesuffix("=...)") if entry.startswith(_LOGGED) else ""
