"""The text of a fault plan becomes the values of `plan.py`, or is refused with a reason.

The reason names the line, what was expected there and what was found.
One fault a line, or several separated by semicolons; `#` begins a comment. docs/faults.md explains
each:

    step 40 rank 1: kill                    in a worker; default: rank 0, point forward
    step 40 rank 1 mid-sum: raise | exit C | hang | pause 5s | slow 3x [for 10 steps]
    step 40 rank 1: flip | flip parameters | flip optimizer | flip gradient
    step 60 node 2: kill | pause 5s | terminate    in an agent
    checkpoint 40 before-commit: kill uploader | pause 5s    in an uploader
    generation 2 rank 1 restore: kill | raise | exit C | hang | pause 5s
    generation 2 node 1 rendezvous: kill | pause 5s | terminate
    every 20±10s: kill random worker, seed 7
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from elastic.errors import UsageError
from elastic.faults import plan
from elastic.faults.plan import (
    FLIP_TARGETS,
    SAVE_POINTS,
    STEP_POINTS,
    AtIntervals,
    AtSave,
    AtStep,
    Fault,
    Flip,
    Kill,
)

T = TypeVar("T")

_DECIMAL = r"[0-9]{1,6}(?:\.[0-9]{1,3})?"
_FORMS_OF_TRIGGERS = {
    "step": "step N, then rank R, rank R POINT, POINT, node K or nothing",
    "checkpoint": f"checkpoint N, then {', '.join(SAVE_POINTS[:-1])} or {SAVE_POINTS[-1]}",
    "generation": "generation N, then rank R restore or node K rendezvous",
}


@dataclass(frozen=True, slots=True)
class _Number:
    """Which numbers a field of a trigger or an action may have; one with a unit has decimals."""

    expected: str
    holds: Callable[[float], bool]
    unit: str = ""


_COUNT = _Number("a number from 1 on", lambda number: number >= 1)
_NUMBERS = {
    "step": _COUNT,
    "generation": _COUNT,
    "steps": _COUNT,
    "rank": _Number("a rank", lambda rank: rank >= 0),
    "node": _Number("the number of a node", lambda node: node >= 0),
    "code": _Number("an exit code from 0 to 255", lambda code: code <= 255),
    "seconds": _Number("a time above 0 such as 5s", lambda seconds: seconds > 0, unit="s"),
    "factor": _Number("a factor above 1 such as 3x", lambda factor: factor > 1, unit="x"),
}


class _Wrong(Exception):  # noqa: N818 - it becomes a UsageError once the line is known
    """What was expected, and what was found."""


def parse(text: str) -> tuple[Fault, ...]:
    """Raises UsageError that names the line, from 1."""
    faults: list[Fault] = []
    for number, line in enumerate(text.splitlines(), 1):
        for part in line.split("#")[0].split(";"):
            words = " ".join(part.split())
            if not words:
                continue
            try:
                fault = _fault(words)
                if any((each.trigger, each.action) == (fault.trigger, fault.action) for each in faults):
                    raise _Wrong("each fault once", words)
            except _Wrong as wrong:
                expected, found = wrong.args
                raise UsageError(
                    f"fault plan, line {number}: expected {expected}, found {found or 'nothing'!r} in {words!r}; docs/faults.md has the language"
                ) from None
            faults.append(fault)
    return tuple(faults)


def _fault(line: str) -> Fault:
    head, colon, action_text = map(str.strip, line.partition(":"))
    if not colon:
        raise _Wrong("a colon between the place and the action", line)
    first, _, rest = head.partition(" ")
    if first == "every":
        return Fault(text=line, trigger=_intervals(rest, action_text), action=Kill())
    trigger = _read(plan.TRIGGERS, head)
    if trigger is None:
        if first in _FORMS_OF_TRIGGERS:
            raise _Wrong(_FORMS_OF_TRIGGERS[first], rest)
        raise _Wrong("step N, checkpoint N, generation N or every N±Ms", head)
    actions = plan.ACTIONS[type(trigger)]
    action = _read(actions, action_text)
    if action is None:
        names = [form.format(code="C", seconds="N", factor="K", steps="M", target="T") for form in actions]
        raise _Wrong(_join_or(names), action_text)
    if isinstance(trigger, AtStep) and isinstance(action, Flip):
        trigger = _place_of_flip(trigger, action, head)
    return Fault(text=line, trigger=trigger, action=action)


def _place_of_flip(trigger: AtStep, action: Flip, head: str) -> AtStep:
    """What is flipped says where: a gradient as it is computed, other memory after the update."""
    point = "forward" if action.target == "gradient" else "optimizer"
    if trigger.point != point and trigger.point in head.split():
        raise _Wrong(f"no point, or {point}, where {action.target} are flipped", trigger.point)
    return replace(trigger, point=point)


def _read(forms: Mapping[str, type[T]], text: str) -> T | None:
    """The value that one of the forms makes of the text, or None; {field} stands for a word."""
    for form, kind in forms.items():
        expression = re.sub(r"{(\w+)}\w*", r"(?P<\1>\\S+)", form).replace(" steps", " steps?")
        if words := re.fullmatch(expression, text):
            return kind(**{name: _value(kind, name, word) for name, word in words.groupdict().items()})
    return None


def _value(kind: type, name: str, word: str) -> float | str:
    if name == "point":
        points = SAVE_POINTS if kind is AtSave else STEP_POINTS
        if word not in points:
            raise _Wrong(_join_or(points), word)
        return word
    if name == "target":
        if word not in FLIP_TARGETS:
            raise _Wrong(_join_or(FLIP_TARGETS), word)
        return word
    number = _NUMBERS[name]
    found = re.fullmatch(f"({_DECIMAL}){number.unit}" if number.unit else "([0-9]{1,12})", word)
    value = None if found is None else float(found[1]) if number.unit else int(found[1])
    if value is None or not number.holds(value):
        raise _Wrong(number.expected, word)
    return value


def _intervals(span: str, action: str) -> AtIntervals:
    found = re.fullmatch(rf"({_DECIMAL})(?:±({_DECIMAL}))?s", span)
    if not found:
        raise _Wrong("every Ns or every N±Ms", span)
    period_s, jitter_s = float(found[1]), float(found[2] or 0)
    if period_s == 0 or jitter_s > period_s:
        raise _Wrong("a time above 0 s that varies by no more than itself", span)
    named = re.fullmatch(r"kill random worker, ?seed ([0-9]{1,12})", action)
    if not named:
        raise _Wrong("kill random worker, seed N", action)
    return AtIntervals(period_s=period_s, jitter_s=jitter_s, seed=int(named[1]))


def _join_or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
