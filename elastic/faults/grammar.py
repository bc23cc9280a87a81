"""The text of a fault plan becomes the values of `plan.py`, or is refused with a reason.

The reason names the line, what was expected there and what was found.
One fault a line, or several separated by semicolons; `#` begins a comment. docs/faults.md explains
each:

    step 40 rank 1: kill                    in a worker; default: rank 0, point forward
    step 40 rank 1 mid-sum: raise | exit C | hang | pause 5s | slow 3x [for 10 steps]
    step 60 node 2: kill | pause 5s | terminate    in an agent
    checkpoint 40 before-commit: kill uploader | pause 5s    in an uploader
    generation 2 rank 1 restore: kill | raise | exit C | hang | pause 5s
    generation 2 node 1 rendezvous: kill | pause 5s | terminate
    every 20±10s: kill random worker, seed 7
"""

import re
from collections import Counter
from dataclasses import replace

from elastic.errors import UsageError
from elastic.faults.plan import (
    SAVE_POINTS,
    STEP_POINTS,
    VICTIMS,
    Action,
    AtIntervals,
    AtNode,
    AtRendezvous,
    AtRestore,
    AtSave,
    AtStep,
    Exit,
    Fault,
    Hang,
    Kill,
    Pause,
    Raise,
    Slow,
    Terminate,
    Trigger,
)

MAX_EXIT_CODE = 255
_NUMBER = r"[0-9]{1,6}(?:\.[0-9]{1,3})?"
_WHOLE = re.compile(r"[0-9]{1,12}")
_TRIGGERS = "step N, checkpoint N, generation N or every N±Ms"
_OF_WORKERS = "kill, raise, exit C, hang or pause Ns"
_OF_STEPS = "kill, raise, exit C, hang, pause Ns, slow Kx or slow Kx for M steps"
_OF_NODES = "kill, pause Ns or terminate"
_OF_SAVES = "kill uploader or pause Ns"
_OF_INTERVALS = f"kill random {', '.join(VICTIMS[:-1])} or {VICTIMS[-1]}, then ', seed N'"


class _Wrong(Exception):  # noqa: N818 - it becomes a UsageError once the line is known
    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected)
        self.expected = expected
        self.found = found or "nothing"


def parse(text: str) -> tuple[Fault, ...]:
    """Raises UsageError that names the line, from 1."""
    faults: list[Fault] = []
    seen: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        for part in line.split("#")[0].split(";"):
            words = " ".join(part.split())
            if not words:
                continue
            try:
                fault = _fault(words)
            except _Wrong as wrong:
                raise UsageError(
                    f"fault plan, line {number}: expected {wrong.expected}, found {wrong.found!r} in {words!r}; docs/faults.md has the language"
                ) from None
            faults.append(replace(fault, occurrence=seen[str(fault)]))
            seen[str(fault)] += 1
    return tuple(faults)


def _fault(line: str) -> Fault:
    head, colon, tail = line.partition(":")
    if not colon:
        raise _Wrong("a colon between the place and the action", line)
    words, action = head.split(), tail.strip()
    if words[:1] == ["every"]:
        return Fault(text=line, trigger=_intervals(words[1:], action), action=Kill())
    trigger = _trigger(words)
    return Fault(text=line, trigger=trigger, action=_action_at(trigger, action))


def _trigger(words: list[str]) -> Trigger:
    match words:
        case ["step", step, "node", node]:
            return AtNode(step=_count(step), node=_whole(node, "the number of a node"))
        case ["step", step, "rank", rank]:
            return AtStep(step=_count(step), rank=_whole(rank, "a rank"), point=STEP_POINTS[0])
        case ["step", step, "rank", rank, point]:
            return AtStep(step=_count(step), rank=_whole(rank, "a rank"), point=_point(point, STEP_POINTS))
        case ["step", step]:
            return AtStep(step=_count(step), rank=0, point=STEP_POINTS[0])
        case ["step", step, point]:
            return AtStep(step=_count(step), rank=0, point=_point(point, STEP_POINTS))
        case ["step", *rest]:
            raise _Wrong("step N, then rank R, rank R POINT, POINT, node K or nothing", " ".join(rest))
        case ["checkpoint", step, point]:
            return AtSave(step=_count(step), point=_point(point, SAVE_POINTS))
        case ["checkpoint", *rest]:
            raise _Wrong(f"checkpoint N, then {_join_or(SAVE_POINTS)}", " ".join(rest))
        case ["generation", number, "rank", rank, "restore"]:
            return AtRestore(generation=_count(number), rank=_whole(rank, "a rank"))
        case ["generation", number, "node", node, "rendezvous"]:
            return AtRendezvous(generation=_count(number), node=_whole(node, "the number of a node"))
        case ["generation", *rest]:
            raise _Wrong("generation N, then rank R restore or node K rendezvous", " ".join(rest))
        case _:
            raise _Wrong(_TRIGGERS, " ".join(words))


def _intervals(words: list[str], action: str) -> AtIntervals:
    span = " ".join(words)
    found = re.fullmatch(rf"({_NUMBER})(?:±({_NUMBER}))?s", span)
    if not found:
        raise _Wrong("every Ns or every N±Ms", span)
    period_s, jitter_s = float(found[1]), float(found[2] or 0)
    if period_s == 0 or jitter_s > period_s:
        raise _Wrong("a time above 0 s that varies by no more than itself", span)
    named = re.fullmatch(rf"kill random ({'|'.join(VICTIMS)}), ?seed ([0-9]{{1,12}})", action)
    if not named:
        raise _Wrong(_OF_INTERVALS, action)
    return AtIntervals(period_s=period_s, jitter_s=jitter_s, victim=named[1], seed=int(named[2]))


def _action_at(trigger: Trigger, text: str) -> Action:
    match trigger:
        case AtStep():
            return _action(text, _OF_STEPS, Kill, Raise, Exit, Hang, Pause, Slow)
        case AtRestore():
            return _action(text, _OF_WORKERS, Kill, Raise, Exit, Hang, Pause)
        case AtNode() | AtRendezvous():
            return _action(text, _OF_NODES, Kill, Pause, Terminate)
        case AtSave() if text == "kill uploader":
            return Kill()
        case AtSave():
            return _action(text, _OF_SAVES, Pause)
        case AtIntervals():
            raise AssertionError("_fault parses it together with its action")


def _action(text: str, expected: str, *allowed: type[Action]) -> Action:
    action: Action
    match text.split():
        case ["kill"]:
            action = Kill()
        case ["raise"]:
            action = Raise()
        case ["hang"]:
            action = Hang()
        case ["terminate"]:
            action = Terminate()
        case ["exit", code]:
            action = Exit(_code(code))
        case ["pause", time]:
            action = Pause(_above(time, 0, "s", "a time above 0 such as 5s"))
        case ["slow", factor]:
            action = Slow(_above(factor, 1, "x", "a factor above 1 such as 3x"))
        case ["slow", factor, "for", steps, "step" | "steps"]:
            action = Slow(_above(factor, 1, "x", "a factor above 1 such as 3x"), _count(steps))
        case _:
            raise _Wrong(expected, text)
    if not isinstance(action, allowed):
        raise _Wrong(expected, text)
    return action


def _point(word: str, points: tuple[str, ...]) -> str:
    if word not in points:
        raise _Wrong(_join_or(points), word)
    return word


def _whole(word: str, what: str) -> int:
    if not _WHOLE.fullmatch(word):
        raise _Wrong(what, word)
    return int(word)


def _count(word: str) -> int:
    """Steps and generations are counted from 1."""
    number = _whole(word, "a number from 1 on")
    if number < 1:
        raise _Wrong("a number from 1 on", word)
    return number


def _code(word: str) -> int:
    code = _whole(word, f"an exit code from 0 to {MAX_EXIT_CODE}")
    if code > MAX_EXIT_CODE:
        raise _Wrong(f"an exit code from 0 to {MAX_EXIT_CODE}", word)
    return code


def _above(word: str, least: float, unit: str, expected: str) -> float:
    number = re.fullmatch(rf"({_NUMBER}){unit}", word)
    if not number or float(number[1]) <= least:
        raise _Wrong(expected, word)
    return float(number[1])


def _join_or(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
