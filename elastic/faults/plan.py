"""A fault plan is a list of faults, and its text is read as these values or refused with a reason.

A place is reached at most once in a generation; a fault is injected once in a run, however often
its place is reached again because steps are replayed. Kills at random intervals are the exception:
they are repeated.

One fault a line, or several separated by semicolons; `#` begins a comment. docs/faults.md explains
the places and the actions, which `_PLACES` and `_ACTIONS` list.

A plan holds no fault that a process cannot inject into itself or into the processes of its node: no
cut network, no full disk, no lost machine. The tests in containers (tests/cluster) do those.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from math import inf

from elastic.errors import UsageError

STEP_POINTS = ("forward", "backward", "mid-sum", "optimizer", "snapshot", "after-snapshot")
SAVE_POINTS = ("upload", "before-commit", "after-commit")
FLIP_TARGETS = ("parameters", "optimizer", "gradient")
NODE, RESTORE, RENDEZVOUS = "node", "restore", "rendezvous"
_MOST_NAMED = 6  # faults that struck nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """point: a STEP_POINT of this step, in the worker of rank `who`; a SAVE_POINT, in the uploader
    that saves this step; `node`, in the agent of node `who` as soon as all its workers have
    finished this step or a later one; `restore`, in the worker of rank `who` of this generation,
    which has loaded the state and not reported it yet; or `rendezvous`, in the agent of node `who`
    of this generation, before it starts its workers.

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
class Action:
    """amount: the exit code, the seconds of a pause, or how many times as long a slow step takes.

    steps: how many are slow; None for the whole generation. target: what a flip changes.
    """

    kind: Kind
    amount: float = 0.0
    steps: int | None = None
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a plan.

    `text` is the line as the user wrote it: events quote it, and its claim is named after it.
    """

    text: str
    trigger: At | AtIntervals
    action: Action


_COUNT, _INDEX = "[1-9][0-9]{0,11}", "[0-9]{1,12}"
_DECIMAL = r"[0-9]{1,6}(?:\.[0-9]{1,3})?"
# How actions are written, for people and as a pattern.
_ACTIONS = {
    "kill": "kill",
    "raise": "raise",
    "exit C (0 to 255)": "exit (?P<amount>[0-9]{1,3})",
    "hang": "hang",
    "pause Ns (above 0)": f"pause (?P<amount>{_DECIMAL})s",
    "slow Kx (K above 1) [for M steps]": f"slow (?P<amount>{_DECIMAL})x(?: for (?P<steps>{_COUNT}) steps?)?",
    f"flip [{'|'.join(FLIP_TARGETS)}]": f"flip(?: (?P<target>{'|'.join(FLIP_TARGETS)}))?",
    "terminate": "terminate",
    "kill uploader": "kill uploader",
}
# Of amounts: more than the first number, up to the second.
_RANGES = {Kind.EXIT: (-1.0, 255.0), Kind.PAUSE: (0.0, inf), Kind.SLOW: (1.0, inf)}
_OF_WORKERS, _OF_NODES = [*_ACTIONS][:5], ["kill", "pause Ns (above 0)", "terminate"]
# How places are written, and the actions that each of them has.
_PLACES = {
    f"step N [rank R] [{'|'.join(STEP_POINTS)}]": (
        f"step (?P<number>{_COUNT})(?: rank (?P<who>{_INDEX}))?(?: (?P<point>{'|'.join(STEP_POINTS)}))?",
        [*_ACTIONS][:7],
    ),
    "step N node K": (f"step (?P<number>{_COUNT}) (?P<point>node) (?P<who>{_INDEX})", _OF_NODES),
    f"checkpoint N {'|'.join(SAVE_POINTS)}": (
        f"checkpoint (?P<number>{_COUNT}) (?P<point>{'|'.join(SAVE_POINTS)})",
        ["kill uploader", "pause Ns (above 0)"],
    ),
    "generation N rank R restore": (
        f"generation (?P<number>{_COUNT}) rank (?P<who>{_INDEX}) (?P<point>restore)",
        _OF_WORKERS,
    ),
    "generation N node K rendezvous": (
        f"generation (?P<number>{_COUNT}) node (?P<who>{_INDEX}) (?P<point>rendezvous)",
        _OF_NODES,
    ),
}
_EVERY = "every N±Ms: kill random worker, seed S (N above 0, M at most N)"


class _Wrong(Exception):  # noqa: N818 - it becomes a UsageError once the line is known
    """The forms that were expected, and what was found."""


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
                    raise _Wrong(["each fault once"], words)
            except _Wrong as wrong:
                expected, found = wrong.args
                raise UsageError(
                    f"fault plan, line {number}: expected {' or '.join(expected)}, found {found!r} in {words!r}; docs/faults.md has the language"
                ) from None
            faults.append(fault)
    return tuple(faults)


def _fault(line: str) -> Fault:
    place, action = (part.strip() for part in line.partition(":")[::2])
    first = place.partition(" ")[0]
    if first == "every":
        return Fault(text=line, trigger=_intervals(place, action), action=Action(kind=Kind.KILL))
    for pattern, actions in _PLACES.values():
        if at := re.fullmatch(pattern, place):
            return _struck(line, at.groupdict(), action, actions)
    forms = [form for form in _PLACES if form.startswith(f"{first} ")]
    raise _Wrong(forms or ["step N ...", "checkpoint N ...", "generation N ...", "every N±Ms"], place)


def _intervals(place: str, action: str) -> AtIntervals:
    span = re.fullmatch(f"every ({_DECIMAL})(?:±({_DECIMAL}))?s", place)
    seed = re.fullmatch(f"kill random worker, ?seed ({_INDEX})", action)
    if span is None or seed is None or not 0 <= float(span[2] or 0) <= float(span[1]) > 0:
        raise _Wrong([_EVERY], f"{place}: {action}")
    return AtIntervals(period_s=float(span[1]), jitter_s=float(span[2] or 0), seed=int(seed[1]))


def _struck(line: str, at: dict[str, str | None], words: str, forms: Sequence[str]) -> Fault:
    """forms: of the actions that this place has. words: of the action."""
    found = next((match for form in forms if (match := re.fullmatch(_ACTIONS[form], words))), None)
    if found is None:
        raise _Wrong(forms, words)
    given = found.groupdict()
    kind, amount, steps = Kind(words.partition(" ")[0]), float(given.get("amount") or 0), given.get("steps")
    above, most = _RANGES.get(kind, (-1.0, 0.0))
    if not above < amount <= most:
        raise _Wrong(forms, words)
    target, point = "", at.get("point") or STEP_POINTS[0]
    if kind is Kind.FLIP:
        # The target says where: a gradient as it is computed, other memory after the update.
        target = given.get("target") or FLIP_TARGETS[0]
        place = "forward" if target == "gradient" else "optimizer"
        if at["point"] not in (None, place):
            raise _Wrong([f"no point, or {place}, where {target} is flipped"], point)
        point = place
    trigger = At(point=point, number=int(at["number"] or 0), who=int(at.get("who") or 0))
    action = Action(kind=kind, amount=amount, steps=None if steps is None else int(steps), target=target)
    return Fault(text=line, trigger=trigger, action=action)


def check_fits(faults: Iterable[Fault], *, nodes: int, nproc: int | None, is_plain: bool = False) -> None:
    """Check that a run of at most `nodes` nodes with `nproc` workers each can reach every place.

    `nproc` is None while it is not known. Raises UsageError for a fault that can never be injected.
    """
    ranks = None if nproc is None else nodes * nproc
    for fault in faults:
        at = fault.trigger
        if isinstance(at, AtIntervals):
            continue
        kind, most = ("node", nodes) if at.point in (NODE, RENDEZVOUS) else ("rank", ranks)
        if most is not None and at.who >= most:
            raise UsageError(
                f"fault plan: expected a {kind} from 0 to {most - 1} (--max-nodes {nodes}), found {at.who} in {fault.text!r}"
            )
        if is_plain and at.point != RENDEZVOUS:
            raise UsageError(
                f"fault plan: expected a recipe with steps, checkpoints and restores for {fault.text!r}, found a script that does not import the library"
            )


# Why a place may not have been reached in a run that is complete.
_WHY = {
    "backward": "a step whose gradients are made by hand has no backward",
    "snapshot": "there was no snapshot after that step; --snapshot-every 1 takes one after each",
    "after-snapshot": "there was no snapshot after that step; --snapshot-every 1 takes one after each",
    NODE: "no such node finished that step or a later one with this plan",
    RESTORE: "that generation did not come with this plan, or had no such rank",
    RENDEZVOUS: "that generation did not come with this plan, or had no such node",
}
_WHY |= dict.fromkeys(SAVE_POINTS, "that step was not saved; --save-every says which are")
_NO_RANK = "no such rank trained that step with this plan"


def unreached(faults: Sequence[Fault], last_step: int) -> list[str]:
    """A line for each of these faults, which struck nothing in a complete run, and perhaps why.

    A drill whose fault never happened proves nothing, and its run looks as if it had withstood it.
    """
    lines = [f"no fault struck: {fault.text} ({_reason(fault.trigger, last_step)})" for fault in faults]
    others = len(lines) - _MOST_NAMED
    return lines[:_MOST_NAMED] + [f"no fault struck of {others} more lines of the plan"] * (others > 0)


def _reason(at: At | AtIntervals, last_step: int) -> str:
    if isinstance(at, AtIntervals):
        return "the run ended before its first time, or no such worker was running then"
    if at.point not in (RESTORE, RENDEZVOUS) and at.number > last_step:
        return f"the run ended after step {last_step}"
    return f"no such point was reached: {_WHY.get(at.point, _NO_RANK)}"
