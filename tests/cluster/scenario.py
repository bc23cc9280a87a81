"""A scenario is a text of commands to a group of containers; a line that cannot be read is named.

This module parses; `scenario_runner.py` carries the commands out. The language:

    # The first comment is the scenario's title.
    options --snapshot-every 2      options of every node; {n1}, {etcd}: addresses
    within 8s                       the longest time from a fault to the end of a new step [10 s]
    memory 900                      MiB that a node may use before the kernel kills a process of it
    volume 16                       size of the run's folder in MiB
    disk 64                         the run's folder is a disk of its own, of as many MiB
    etcd 3                          members e1, e2, e3 of an etcd cluster, started before the nodes
    store                           the run lies in an object store, and nodes share nothing else
    pods                            nodes are the first processes of their containers, as in pods
    start 3 --max-nodes 2           three nodes, which wait for each other; options of these nodes
    again n1                        start a killed machine, and run the same command on it
    again n1 elsewhere              the same pod with another address, when the old one has ended
    shut 10 meet-2 load-2           close gates
    stands 10                       wait until all ranks of the newest generation wait at the gate
    open 10                         open the gate
    kill node of rank 0             inject a fault; see below
    until restored generation=2     wait for an event with these fields; node=n2: the second node
    until the store has restored    the same, for events that were uploaded to the store
    until the group knows 12        wait until the group has noted this checkpoint in the store, a
                                    moment after its commit
    until n2 says waiting           wait until a node has printed this text
    ends n3 2                       wait until this node has ended, with this code
    probe n1                        `elastic-train status`, executed in the pod, ends with 0
    hold 5s                         how long a fault lasts, for example a pause
    release                         end pauses and cuts, repair the volume, revive killed members
    end 0 137                       wait until all nodes have ended, with these codes in any order
    > generation 1: 2 workers, start; restored step 0 from none

Lines that begin with `>` are the history that is expected.

Gates: a rank waits before step 10, in generation 2 before it asks which states exist (meet-2), and
in generation 2 while it loads the state (load-2).

Actions on nodes, named as `node of rank 0`, `nodes of ranks 1 2`, `every node`, `node n1`, `members
e1 e2`: kill (SIGKILL to the container), terminate (SIGTERM to the agent), pause (all processes
stop), cut (no packet arrives or leaves), deafen (none arrives), mute (none leaves), unplug (the
network interface vanishes), jump (the wall clock goes an hour ahead), jump-back (a day back).

Actions on workers, named as `worker of rank 0` (-1 for the last rank): kill, starve (once its gate
is open, the worker takes all memory that it can get).

Faults of the shared folder: `fill volume`, `lock volume` (nothing can be opened for writing), `flip
newest checkpoint` (one bit), `truncate newest checkpoint`, `empty newest version` (of the group).

`cut power`: every node and the disk of the run's folder end at the same moment. The disk keeps only
what was written to it by then; what still lay in the memory of its file system is lost.

Faults of the object store, until `storage heals`, which first waits until a request was affected:
`storage answers 500`, `storage answers 503`, `storage hangs`, `storage loses answers to commits`,
`storage lists what was` (listings stay as they are now).
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

BOUND_S = 10.0
NODE = r"n\d+"
NAME = r"[en]\d+"
GATE = r"\d+|(?:meet|load)-\d+"


class Action(Enum):
    KILL = "kill"
    TERMINATE = "terminate"
    PAUSE = "pause"
    CUT = "cut"
    DEAFEN = "deafen"
    MUTE = "mute"
    UNPLUG = "unplug"
    JUMP = "jump"
    JUMP_BACK = "jump-back"
    STARVE = "starve"


class VolumeFault(Enum):
    """Faults of the shared folder."""

    FILL = "fill volume"
    LOCK = "lock volume"
    FLIP = "flip newest checkpoint"
    TRUNCATE = "truncate newest checkpoint"
    EMPTY = "empty newest version"


class StorageMode(Enum):
    """How the object store behaves from now on."""

    ERROR = "storage answers 500"
    SLOW_DOWN = "storage answers 503"
    HANG = "storage hangs"
    LOSE = "storage loses answers to commits"
    STALE = "storage lists what was"
    HEAL = "storage heals"


WORKER_ACTIONS = (Action.KILL, Action.STARVE)
CLOCK_ACTIONS = (Action.JUMP, Action.JUMP_BACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    nodes: int
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    node: str
    is_elsewhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
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
class Inject:
    """An action on the nodes of `ranks`, on their workers only (`is_worker`), or on the nodes
    `names`. Rank -1 is the last one.

    Without ranks and names: on every node that runs.
    """

    action: Action
    ranks: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    is_worker: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """is_uploaded: wait until the event can be read in the object store."""

    event: str
    fields: dict[str, int | str]
    is_uploaded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UntilKnown:
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Says:
    node: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPower:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """One node ends, while others may go on."""

    node: str
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    codes: tuple[int, ...]  # sorted


Command = (
    Start
    | Again
    | Probe
    | Shut
    | Stands
    | Open
    | Inject
    | VolumeFault
    | StorageMode
    | CutPower
    | Until
    | UntilKnown
    | Says
    | Hold
    | Release
    | Ends
    | End
)


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
    disk_mib: int | None = None
    members: int = 0  # of etcd
    has_store: bool = False
    has_pods: bool = False

    @property
    def nodes(self) -> int:
        """The number of nodes that the scenario starts in all."""
        return sum(command.nodes for command in self.commands if isinstance(command, Start))

    def does(self, *actions: Action) -> bool:
        return any(isinstance(command, Inject) and command.action in actions for command in self.commands)


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
            case "memory" | "volume" | "disk":
                (settings[f"{word}_mib"],) = _numbers(rest, where, count=1)
            case "store" | "pods" if not rest:
                settings[f"has_{word}"] = True
            case "etcd":
                (settings["members"],) = _numbers(rest, where, count=1)
            case _:
                commands.append(_command(word, rest, where))
                _check_settings(commands[-1], where, settings)
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
    """The scenario's text, with `happened` as its expected history."""
    kept = [line for line in text.splitlines() if not line.startswith(">")]
    return "\n".join([*kept, *(f"> {line}" for line in happened)]) + "\n"


def _command(word: str, rest: str, where: str) -> Command:
    match word:
        case "start":
            nodes, *options = rest.split() or [""]
            return Start(nodes=_numbers(nodes, where)[0], options=tuple(options))
        case "again" if again := re.fullmatch(rf"({NODE})( elsewhere)?", rest):
            return Again(node=again[1], is_elsewhere=again[2] is not None)
        case "probe" if re.fullmatch(NODE, rest):
            return Probe(node=rest)
        case "shut":
            return Shut(gates=_gates(rest, where))
        case "stands":
            (gate,) = _gates(rest, where, count=1)
            return Stands(gate=gate)
        case "open":
            (gate,) = _gates(rest, where, count=1)
            return Open(gate=gate)
        case "until" if says := re.fullmatch(rf"({NODE}) says (.+)", rest):
            return Says(node=says[1], text=says[2])
        case "until" if known := re.fullmatch(r"the group knows (\d+)", rest):
            return UntilKnown(step=int(known[1]))
        case "until":
            return _until(rest, where)
        case "cut" if rest == "power":
            return CutPower()
        case "ends" if ends := re.fullmatch(rf"({NODE}) (\d+)", rest):
            return Ends(node=ends[1], code=int(ends[2]))
        case "hold":
            return Hold(seconds=_seconds(rest, where))
        case "release" if not rest:
            return Release()
        case "end":
            return End(codes=tuple(sorted(_numbers(rest, where))))
        case _ if (line := f"{word} {rest}") in {each.value for each in VolumeFault}:
            return VolumeFault(line)
        case "storage" if line in {each.value for each in StorageMode}:
            return StorageMode(line)
        case action if action in {each.value for each in Action}:
            return _inject(Action(action), rest, where)
        case _:
            verbs = "start, again, probe, shut, stands, open, until, hold, release, ends, end or an action"
            raise ValueError(f"{where}: expected {verbs}, found {word!r}")


def _inject(action: Action, whom: str, where: str) -> Inject:
    if whom == "every node" and action is not Action.STARVE:
        return Inject(action=action)
    if named := re.fullmatch(rf"(?:node|member)s? ({NAME}(?: {NAME})*)", whom):
        return Inject(action=action, names=tuple(named[1].split()))
    found = re.fullmatch(r"(node|worker)s? of ranks? (-1|\d+(?: \d+)*)", whom)
    if (
        found is None
        or (found[1] == "worker" and action not in WORKER_ACTIONS)
        or (found[1] == "node" and action is Action.STARVE)
    ):
        raise ValueError(
            f"{where}: expected `{action.value} node of rank 0`, `nodes of ranks 0 1`, `every node`, `node n1`, `members e1 e2` "
            f"or `kill worker of rank 0`, found {whom!r}"
        )
    ranks = tuple(int(rank) for rank in found[2].split())
    return Inject(action=action, ranks=ranks, is_worker=found[1] == "worker")


def _check_settings(command: Command, where: str, settings: Mapping[str, Any]) -> None:
    has_store = "has_store" in settings
    is_uploaded = isinstance(command, Until) and command.is_uploaded
    of_store = is_uploaded or isinstance(command, StorageMode | UntilKnown)
    if (isinstance(command, VolumeFault) and has_store) or (of_store and not has_store):
        raise ValueError(f"{where}: expected this {'without' if has_store else 'below'} a line `store`")
    if isinstance(command, CutPower) and "disk_mib" not in settings:
        raise ValueError(f"{where}: expected this below a line `disk`")
    of_pods = isinstance(command, Probe) or (isinstance(command, Again) and command.is_elsewhere)
    if of_pods and "has_pods" not in settings:
        raise ValueError(f"{where}: expected this below a line `pods`")


def _until(rest: str, where: str) -> Until:
    words = rest.split()
    is_uploaded = words[:3] == ["the", "store", "has"]
    event, *pairs = words[3 if is_uploaded else 0 :] or [""]
    fields: dict[str, int | str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{where}: expected `until EVENT FIELD=VALUE`, found {pair!r}")
        fields[key] = int(value) if value.isdecimal() else value
    if not event:
        raise ValueError(f"{where}: expected the name of an event, found nothing")
    return Until(event=event, fields=fields, is_uploaded=is_uploaded)


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
