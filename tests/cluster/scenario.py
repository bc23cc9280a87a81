"""A scenario is a text that says what happens to a group of containers, line by line; it is read into values or refused with its line.

It does nothing: `scenario_runner.py` does. The language:

    # The first comment is the scenario's title.
    options --snapshot-every 2        further options of every node; {n1} is the address of the first node, {etcd} those of etcd's members
    within 8s                         the most that a fault may cost, from the deed to the end of the next new step [10 s]
    memory 900                        MiB that a node may use before the kernel kills something in it
    volume 16                         MiB that the run's folder has
    etcd 3                            members, named e1, e2, e3, which are there before the nodes
    store                             the run lies in an object store, and the nodes share nothing else
    start 3                           so many nodes, which wait for each other; what follows the number are their own options
    again n1                          a machine that was killed is switched on, and the same command is given there
    shut 10 meet-2 load-2             gates: no rank begins step 10 before it is opened, none of generation 2 asks what there is to restore, none has it loaded whole
    stands 10                         wait until all ranks of the newest generation stand before it
    open 10
    kill node of rank 0               or: worker of rank 0, nodes of ranks 1 2, every node, node n1, members e1 e2
    until restored generation=2       wait for an event with these fields; node=n2 is the second node that was started
    until the store has restored      the same, of what was carried to the store
    hold 5s                           time that belongs to the fault: how long a node sleeps or is cut off
    release                           undo every pause and every cut, make the volume what it was, bring killed members back
    end 0 137                         wait until all nodes have ended, with these exit codes in any order
    > generation 1: 2 workers, start; restored step 0 from none

Deeds: kill (SIGKILL to a container, or to a worker in it), terminate (SIGTERM to the agent), pause (every process stops), cut (no packet comes in or
goes out), deafen (none comes in), mute (none goes out), unplug (the interface is gone), jump (the wall clock goes an hour ahead), starve (a worker takes all
memory that it can get, once its gate is open). To what the nodes share: `fill volume`, `lock volume` (nothing can be opened for writing), `flip newest checkpoint` (one
bit of it), `truncate newest checkpoint`. To the store's answers, until `storage heals`, which waits until one was struck: `storage answers 500`, `storage answers 503`,
`storage hangs`, `storage loses answers to commits`, `storage lists what was` (now). Lines that begin with `>` are what must have happened.
"""

import re
import shlex
from dataclasses import dataclass
from enum import Enum
from typing import Any

BOUND_S = 10.0
NODE = r"n\d+"
NAME = r"[en]\d+"
GATE = r"\d+|(?:meet|load)-\d+"


class Deed(Enum):
    KILL = "kill"
    TERMINATE = "terminate"
    PAUSE = "pause"
    CUT = "cut"
    DEAFEN = "deafen"
    MUTE = "mute"
    UNPLUG = "unplug"
    JUMP = "jump"
    STARVE = "starve"


class Harm(Enum):
    """Deeds to what the nodes share."""

    FILL = "fill volume"
    LOCK = "lock volume"
    FLIP = "flip newest checkpoint"
    TRUNCATE = "truncate newest checkpoint"


class Storage(Enum):
    """What the object store does from now on."""

    ERROR = "storage answers 500"
    SLOW_DOWN = "storage answers 503"
    HANG = "storage hangs"
    LOSE = "storage loses answers to commits"
    STALE = "storage lists what was"
    HEAL = "storage heals"


OF_WORKERS = (Deed.KILL, Deed.STARVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    nodes: int
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shut:
    gates: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stands:
    gate: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    gate: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Whom: the nodes of `ranks`, or their workers alone (`is_worker`), or those with `names`; every node that runs where neither says anything."""

    deed: Deed
    ranks: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    is_worker: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """`is_carried`: to the store, where the run lies in one."""

    event: str
    fields: dict[str, int | str]
    is_carried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    codes: tuple[int, ...]  # sorted


Command = Start | Again | Shut | Stands | Open | Strike | Harm | Storage | Until | Hold | Release | End


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    title: str
    options: tuple[str, ...]
    commands: tuple[Command, ...]
    expected: tuple[str, ...]  # without their `>`
    within_s: float = BOUND_S
    memory_mib: int | None = None
    volume_mib: int | None = None
    members: int = 0  # of etcd
    has_store: bool = False

    @property
    def nodes(self) -> int:
        """How many there are from start to end."""
        return sum(command.nodes for command in self.commands if isinstance(command, Start))

    def does(self, deed: Deed) -> bool:
        return any(isinstance(command, Strike) and command.deed is deed for command in self.commands)


def parse(name: str, text: str) -> Scenario:
    """Raises ValueError that names the line."""
    title = ""
    options: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    commands: list[Command] = []
    expected: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        word, _, rest = line.strip().partition(" ")
        where = f"{name}, line {number}"
        match word:
            case "":
                pass
            case "#":
                title = title or rest
            case ">":
                expected.append(rest)
            case "options":
                options = tuple(shlex.split(rest))
            case "within":
                settings["within_s"] = _seconds(rest, where)
            case "memory" | "volume":
                (settings[f"{word}_mib"],) = _numbers(rest, where, count=1)
            case "store" if not rest:
                settings["has_store"] = True
            case "etcd":
                (settings["members"],) = _numbers(rest, where, count=1)
            case _:
                commands.append(_command(word, rest, where))
                _check_storage(commands[-1], where, has_store="has_store" in settings)
    if not title or not any(isinstance(command, Start) for command in commands):
        raise ValueError(f"{name}: expected a comment that says what happens, and a line `start N`")
    return Scenario(
        name=name,
        title=title,
        options=options,
        commands=tuple(commands),
        expected=tuple(expected),
        **settings,
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
        case "again" if re.fullmatch(NODE, rest):
            return Again(node=rest)
        case "shut":
            return Shut(gates=_gates(rest, where))
        case "stands":
            (gate,) = _gates(rest, where, count=1)
            return Stands(gate=gate)
        case "open":
            (gate,) = _gates(rest, where, count=1)
            return Open(gate=gate)
        case "until":
            return _until(rest, where)
        case "hold":
            return Hold(seconds=_seconds(rest, where))
        case "release" if not rest:
            return Release()
        case "end":
            return End(codes=tuple(sorted(_numbers(rest, where))))
        case _ if (line := f"{word} {rest}") in {each.value for each in Harm}:
            return Harm(line)
        case "storage" if line in {each.value for each in Storage}:
            return Storage(line)
        case deed if deed in {each.value for each in Deed}:
            return _strike(Deed(deed), rest, where)
        case _:
            verbs = "start, again, shut, stands, open, until, hold, release, end or a deed"
            raise ValueError(f"{where}: expected {verbs}, found {word!r}")


def _strike(deed: Deed, whom: str, where: str) -> Strike:
    if whom == "every node" and deed is not Deed.STARVE:
        return Strike(deed=deed)
    if named := re.fullmatch(rf"(?:node|member)s? ({NAME}(?: {NAME})*)", whom):
        return Strike(deed=deed, names=tuple(named[1].split()))
    found = re.fullmatch(r"(node|worker)s? of ranks? (\d+(?: \d+)*)", whom)
    if (
        found is None
        or (found[1] == "worker" and deed not in OF_WORKERS)
        or (found[1] == "node" and deed is Deed.STARVE)
    ):
        raise ValueError(
            f"{where}: expected `{deed.value} node of rank 0`, `nodes of ranks 0 1`, `every node`, `node n1`, `members e1 e2` "
            f"or `kill worker of rank 0`, found {whom!r}"
        )
    return Strike(deed=deed, ranks=_numbers(found[2], where), is_worker=found[1] == "worker")


def _check_storage(command: Command, where: str, *, has_store: bool) -> None:
    of_store = isinstance(command, Storage) or (isinstance(command, Until) and command.is_carried)
    if (isinstance(command, Harm) and has_store) or (of_store and not has_store):
        raise ValueError(f"{where}: expected it {'without' if has_store else 'below'} a line `store`")


def _until(rest: str, where: str) -> Until:
    words = rest.split()
    is_carried = words[:3] == ["the", "store", "has"]
    event, *pairs = words[3 if is_carried else 0 :] or [""]
    fields: dict[str, int | str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{where}: expected `until EVENT FIELD=VALUE`, found {pair!r}")
        fields[key] = int(value) if value.isdecimal() else value
    if not event:
        raise ValueError(f"{where}: expected the name of an event, found nothing")
    return Until(event=event, fields=fields, is_carried=is_carried)


def _numbers(text: str, where: str, count: int | None = None) -> tuple[int, ...]:
    words = text.split()
    if not words or not all(word.isdecimal() for word in words) or count not in (None, len(words)):
        raise ValueError(f"{where}: expected {count or 'some'} numbers, found {text!r}")
    return tuple(int(word) for word in words)


def _gates(text: str, where: str, count: int | None = None) -> tuple[str, ...]:
    words = tuple(text.split())
    if not words or not all(re.fullmatch(GATE, word) for word in words) or count not in (None, len(words)):
        raise ValueError(f"{where}: expected {count or 'some'} gates as 10, meet-2, load-2, found {text!r}")
    return words


def _seconds(text: str, where: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)s", text)
    if found is None:
        raise ValueError(f"{where}: expected seconds such as 5s, found {text!r}")
    return float(found[1])
