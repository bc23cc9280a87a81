"""The first step and entry that differ are found from the lines that two runs wrote."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastic.system.trace_line import TraceLine


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """step: the first one that differs. entry: of the state, or what of the step differs.

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
        if line.step in expected and (entry := _entry_that_differs(expected[line.step], line, ignored)):
            calm = expected[line.step]
            return FirstDifference(
                step=line.step,
                entry=entry,
                has_same_loss=calm.loss == line.loss,
                is_logged_alone=(calm.entries, calm.loss, calm.chain)
                == (line.entries, line.loss, line.chain),
            )
    return None


def _entry_that_differs(expected: TraceLine, found: TraceLine, ignored: Collection[str]) -> str | None:
    for name in sorted(expected.entries.keys() | found.entries.keys()):
        if expected.entries.get(name) != found.entries.get(name):
            return name
    if expected.loss != found.loss:
        return "the loss"
    if expected.chain != found.chain:
        return "the gradients"
    names = sorted(expected.logged.keys() | found.logged.keys() - set(ignored))
    differing = (name for name in names if expected.logged.get(name) != found.logged.get(name))
    return next((f"step.log({name}=...)" for name in differing if name not in ignored), None)


def unsteady_values(expected: Mapping[int, TraceLine], again: Sequence[TraceLine]) -> frozenset[str]:
    """Names of logged values that two equal commands logged differently, as seconds are."""
    return frozenset(
        name
        for line in again
        if line.step in expected
        for name in line.logged.keys() | expected[line.step].logged.keys()
        if line.logged.get(name) != expected[line.step].logged.get(name)
    )
