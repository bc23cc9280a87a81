"""A scenario is a text that says what happens to a group of containers, line by line; it is read into values or refused with its line.

It does nothing: `play.py` does. The language:

    # The first comment is the scenario's title.
    options --snapshot-every 2        further options of every node
    within 8s                         the most that a fault may cost, from the deed to the end of the next new step [10 s]
    start 3                           so many nodes, which wait for each other; what follows the number are their own options
    shut 10 14                        gates: no rank begins step 10 or 14 before it is opened
    stands 10                         wait until all ranks of the newest generation stand before step 10
    open 10
    kill node of rank 0               or: worker of rank 0, nodes of ranks 1 2, every node
    until restored generation=2       wait for an event with these fields; node=n2 is the second node that was started
    hold 5s                           time that belongs to the fault: how long a node sleeps or is cut off
    release                           undo every pause and every cut
    end 0 137                         wait until all nodes have ended, with these exit codes in any order
    > generation 1: 2 workers, start; restored step 0 from none

Deeds: kill (SIGKILL to a container, or to a worker in it), terminate (SIGTERM to the agent), pause (every process stops), cut (no packet comes in or
goes out), deafen (none comes in), mute (none goes out), unplug (the interface is gone). Lines that begin with `>` are what must have happened.
"""

import re
from dataclasses import dataclass
from enum import Enum

BOUND_S = 10.0


class Deed(Enum):
    KILL = "kill"
    TERMINATE = "terminate"
    PAUSE = "pause"
    CUT = "cut"
    DEAFEN = "deafen"
    MUTE = "mute"
    UNPLUG = "unplug"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    nodes: int
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shut:
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stands:
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """`ranks` is None for every node that runs; `is_worker`: the worker alone, not its node."""

    deed: Deed
    ranks: tuple[int, ...] | None
    is_worker: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    event: str
    fields: dict[str, int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    codes: tuple[int, ...]  # sorted


Command = Start | Shut | Stands | Open | Strike | Until | Hold | Release | End


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    title: str
    options: tuple[str, ...]
    within_s: float
    commands: tuple[Command, ...]
    expected: tuple[str, ...]  # without their `>`


def parse(name: str, text: str) -> Scenario:
    """Raises ValueError that names the line."""
    title, options, within_s = "", (), BOUND_S
    commands: list[Command] = []
    expected: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        word, _, rest = line.strip().partition(" ")
        match word:
            case "":
                pass
            case "#":
                title = title or rest
            case ">":
                expected.append(rest)
            case "options":
                options = tuple(rest.split())
            case "within":
                within_s = _seconds(rest, f"{name}, line {number}")
            case _:
                commands.append(_command(word, rest, f"{name}, line {number}"))
    if not title or not any(isinstance(command, Start) for command in commands):
        raise ValueError(f"{name}: expected a comment that says what happens, and a line `start N`")
    return Scenario(
        name=name,
        title=title,
        options=options,
        within_s=within_s,
        commands=tuple(commands),
        expected=tuple(expected),
    )


def rewritten(text: str, happened: list[str]) -> str:
    """The scenario with what happened in place of what it expected, for a person to review as a difference."""
    kept = [line for line in text.splitlines() if not line.startswith(">")]
    return "\n".join([*kept, *(f"> {line}" for line in happened)]) + "\n"


def _command(word: str, rest: str, where: str) -> Command:
    match word:
        case "start":
            nodes, *options = rest.split() or [""]
            return Start(nodes=_numbers(nodes, where)[0], options=tuple(options))
        case "shut":
            return Shut(steps=_numbers(rest, where))
        case "stands":
            return Stands(step=_numbers(rest, where)[0])
        case "open":
            return Open(step=_numbers(rest, where)[0])
        case "until":
            return _until(rest, where)
        case "hold":
            return Hold(seconds=_seconds(rest, where))
        case "release" if not rest:
            return Release()
        case "end":
            return End(codes=tuple(sorted(_numbers(rest, where))))
        case deed if deed in {each.value for each in Deed}:
            return _strike(Deed(deed), rest, where)
        case _:
            raise ValueError(
                f"{where}: expected start, shut, stands, open, until, hold, release, end or a deed, found {word!r}"
            )


def _strike(deed: Deed, whom: str, where: str) -> Strike:
    if whom == "every node":
        return Strike(deed=deed, ranks=None, is_worker=False)
    found = re.fullmatch(r"(node|worker)s? of ranks? (\d+(?: \d+)*)", whom)
    if found is None or (found[1] == "worker" and deed is not Deed.KILL):
        raise ValueError(
            f"{where}: expected `{deed.value} node of rank 0`, `nodes of ranks 0 1`, `every node` or `kill worker of rank 0`, found {whom!r}"
        )
    return Strike(deed=deed, ranks=_numbers(found[2], where), is_worker=found[1] == "worker")


def _until(rest: str, where: str) -> Until:
    event, *pairs = rest.split() or [""]
    fields: dict[str, int | str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{where}: expected `until EVENT FIELD=VALUE`, found {pair!r}")
        fields[key] = int(value) if value.isdecimal() else value
    if not event:
        raise ValueError(f"{where}: expected the name of an event, found nothing")
    return Until(event=event, fields=fields)


def _numbers(text: str, where: str) -> tuple[int, ...]:
    words = text.split()
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError(f"{where}: expected numbers, found {text!r}")
    return tuple(int(word) for word in words)


def _seconds(text: str, where: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)s", text)
    if found is None:
        raise ValueError(f"{where}: expected seconds such as 5s, found {text!r}")
    return float(found[1])
