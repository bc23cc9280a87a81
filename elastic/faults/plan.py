"""A fault plan is a list of faults, and its text is read as these values or refused with a reason.

A fault is injected once in a run, however often its place is reached, by shards or in replays.
Kills at random intervals are the exception: they are repeated.

One fault a line, or several separated by semicolons; `#` begins a comment. docs/faults.md explains
the places and the actions, which `_FORMS` lists.

A plan holds no fault that a process cannot inject into itself or into the processes of its node: no
cut network, no full disk, no lost machine. The tests in containers (tests/cluster) do those.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from math import inf

from elastic.errors import UsageError

STEP_POINTS = ("forward", "backward", "mid-sum", "optimizer", "snapshot", "after-snapshot")
SAVE_POINTS = ("upload", "before-commit", "after-commit")
FLIP_TARGETS = ("parameters", "optimizer", "gradient")
NODE, RESTORE = "node", "restore"
_MOST_NAMED = 6  # faults that struck nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """point: a STEP_POINT of this step, in the worker of rank `who`; a SAVE_POINT, in the uploader
    that saves this step; `node`, in the agent of node `who` as soon as all its workers have
    finished this step or a later one; or `restore`, in the worker of rank `who` of this generation,
    which has loaded the state and not reported it yet.

    number: the step or the generation, from 1. who: from 0; nodes in the order of their ranks.
    """

    point: str
    number: int
    who: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AtIntervals:
    """A worker is killed again and again, `period_s` ± `jitter_s` seconds after the kill before.

    The wait and the victim of a kill are drawn from the seed and the number of the kill, counted
    from 0, and from nothing else.
    """

    period_s: float
    jitter_s: float
    seed: int

    def wait_s(self, kill: int) -> float:
        """Seconds from the kill before to this one."""
        return self.period_s + self.jitter_s * (2 * self._draw(kill, "wait") - 1)

    def pick(self, kill: int, among: int) -> int:
        """The index of the victim among so many candidates, from 0."""
        return int(self._draw(kill, "victim") * among)

    def _draw(self, kill: int, purpose: str) -> float:
        """A number in [0, 1)."""
        digest = sha256(f"{self.seed} {kill} {purpose}".encode()).digest()
        return int.from_bytes(digest[:6], "little") / (1 << 48)


class Kind(StrEnum):
    """KILL: SIGKILL; for a node, to its agent and every process that the agent started. RAISE: an
    exception in the recipe. HANG: the main thread stands still. PAUSE: SIGSTOP, and SIGCONT later.
    SLOW: each step takes longer. FLIP: one bit changes in the largest tensor of a kind. TERMINATE:
    SIGTERM to an agent.
    """

    KILL = "kill"
    RAISE = "raise"
    EXIT = "exit"
    HANG = "hang"
    PAUSE = "pause"
    SLOW = "slow"
    FLIP = "flip"
    TERMINATE = "terminate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a plan.

    `text` is the fault in words: events quote it, and its claim is named after it. amount: the exit
    code, the seconds of a pause, or those that each shard of a slow step waits. target: what a flip
    changes.
    """

    text: str
    trigger: At | AtIntervals
    kind: Kind
    amount: float = 0.0
    target: str = ""


# Of amounts: more than the first number, up to the second.
_RANGES = {Kind.EXIT: (-1.0, 255.0), Kind.PAUSE: (0.0, inf), Kind.SLOW: (0.0, inf)}
_COUNT, _INDEX, _DECIMAL = "[1-9][0-9]{0,11}", "[0-9]{1,12}", r"[0-9]{1,6}(?:\.[0-9]{1,3})?"
_PAUSE = f"pause (?P<pause>{_DECIMAL})s"
_OF_WORKERS = f"kill|raise|hang|exit (?P<exit>[0-9]{{1,3}})|{_PAUSE}"
_OF_STEPS = f"{_OF_WORKERS}|slow (?P<slow>{_DECIMAL})s|flip(?: (?P<flip>{'|'.join(FLIP_TARGETS)}))?"
# How lines are written, for people, and as a pattern of the place and one of the action.
_FORMS = {
    "step N [rank R] [POINT]: kill, raise, exit C, hang, pause Ns, slow Ns or flip [TARGET]": (
        f"step (?P<number>{_COUNT})(?: rank (?P<who>{_INDEX}))?(?: (?P<point>{'|'.join(STEP_POINTS)}))?",
        _OF_STEPS,
    ),
    "step N node K: kill, pause Ns or terminate": (
        f"step (?P<number>{_COUNT}) (?P<point>node) (?P<who>{_INDEX})",
        f"kill|terminate|{_PAUSE}",
    ),
    f"checkpoint N {'|'.join(SAVE_POINTS)}: kill uploader or pause Ns": (
        f"checkpoint (?P<number>{_COUNT}) (?P<point>{'|'.join(SAVE_POINTS)})",
        f"kill uploader|{_PAUSE}",
    ),
    "generation N rank R restore: kill, raise, exit C, hang or pause Ns": (
        f"generation (?P<number>{_COUNT}) rank (?P<who>{_INDEX}) (?P<point>restore)",
        _OF_WORKERS,
    ),
    "every N±Ms: kill random worker, seed S": (
        f"(?P<every>every) (?P<period>{_DECIMAL})(?:±(?P<jitter>{_DECIMAL}))?s",
        f"kill random worker, ?seed (?P<seed>{_INDEX})",
    ),
}


def parse(text: str) -> tuple[Fault, ...]:
    """Raises UsageError that names the line, from 1."""
    faults: list[Fault] = []
    for number, line in enumerate(text.splitlines(), 1):
        for part in line.split("#")[0].split(";"):
            if not (words := " ".join(part.split())):
                continue
            if (fault := _fault(words)) is None:
                forms = [form for form in _FORMS if form.split()[0] == words.split()[0]]
                raise UsageError(
                    f"fault plan, line {number}: expected {' or '.join(forms or ['step, checkpoint, generation or every'])}, "
                    f"found {words!r:.100}; docs/faults.md has the language"
                )
            faults.append(fault)
    return tuple(faults)


def _fault(words: str) -> Fault | None:
    """None for a line that has none of the forms, or a number out of its range."""
    for place, action in _FORMS.values():
        if (found := re.fullmatch(f"{place} ?: ?(?P<action>{action})", words)) is None:
            continue
        given = found.groupdict()
        if given.get("every"):
            every = AtIntervals(
                period_s=float(given["period"]), jitter_s=float(given["jitter"] or 0), seed=int(given["seed"])
            )
            is_possible = 0 <= every.jitter_s <= every.period_s > 0
            return Fault(text=words, trigger=every, kind=Kind.KILL) if is_possible else None
        kind = Kind(given["action"].partition(" ")[0])
        amount = float(given.get(kind.value) or 0) if kind in _RANGES else 0.0
        above, most = _RANGES.get(kind, (-1.0, 0.0))
        target, point = "", given.get("point") or STEP_POINTS[0]
        if kind is Kind.FLIP:
            # The target says where: a gradient as it is computed, other memory after the update, or
            # before it.
            target = given["flip"] or FLIP_TARGETS[0]
            places = ("forward",) if target == "gradient" else ("optimizer", "mid-sum")
            point = given.get("point") or places[0]
            if point not in places:
                return None
        if not above < amount <= most:
            return None
        return Fault(
            text=words,
            trigger=At(point=point, number=int(given["number"]), who=int(given.get("who") or 0)),
            kind=kind,
            amount=amount,
            target=target,
        )
    return None


def unreached(faults: Sequence[Fault], last_step: int) -> list[str]:
    """A line for each of these faults, which struck nothing in a complete run.

    A drill whose fault never happened proves nothing, and its run looks as if it had withstood it.
    """
    shown = [f"no fault struck: {fault.text} (not reached in {last_step} steps)" for fault in faults]
    others = len(faults) - _MOST_NAMED
    return shown[:_MOST_NAMED] + [f"no fault struck of {others} more lines of the plan"] * (others > 0)
