"""A scenario is a text of commands to a group of machines; a line that cannot be read is named.

This module has the language; `scenario_runner.py` carries the commands out. Settings:

    # The first comment is the scenario's title.
    options --snapshot-every 2      options of every node; {n1}, {etcd}: addresses
    within 8s                       the longest time from a fault to the end of a new step [10 s]
    memory 900                      MiB that a node may use before the kernel kills a process of it
    volume 16                       size of the run's folder in MiB
    disk 64                         the run's folder is a disk of its own, of as many MiB
    etcd 3                          members e1, e2, e3 of an etcd cluster, started before the nodes
    store                           the run lies in an object store, and nodes share nothing else
    pods                            nodes are the first processes of their containers, as in pods

Commands:

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

Faults of nodes, named as `node of rank 0`, `nodes of ranks 1 2`, `every node`, `node n1`, `members
e1 e2`: kill (SIGKILL to the container), terminate (SIGTERM to the agent), pause (all processes
stop), cut (no packet arrives or leaves), deafen (none arrives), mute (none leaves), unplug (the
network interface vanishes), jump (the wall clock goes an hour ahead), jump-back (a day back).

Faults of workers, named as `worker of rank 0` (-1 for the last rank): kill, starve (once its gate
is open, the worker takes all memory that it can get).

Faults of the shared folder: `fill volume`, `lock volume` (nothing can be opened for writing), `flip
newest checkpoint` (one bit), `truncate newest checkpoint`.

`cut power`: every node and the disk of the run's folder end at the same moment. The disk keeps only
what was written to it by then; what still lay in the memory of its file system is lost.

Faults of the object store, until `storage heals`, which first waits until a request was affected:
`storage answers 500`, `storage answers 503`, `storage hangs`, `storage loses answers to commits`,
`storage lists what was` (listings stay as they are now).
"""

import re
import shlex
from dataclasses import dataclass

NODE, NAME, GATE = r"n\d+", r"[en]\d+", r"(?:\d+|(?:meet|load)-\d+)"
FIELDS = r"(?P<event>\w+)(?P<fields>(?: \w+=\S+)*)"
COMMANDS = {
    name: re.compile(pattern)
    for name, pattern in {
        "start": r"start (?P<nodes>\d+)(?P<options>(?: \S+)*)",
        "again": rf"again (?P<node>{NODE})(?P<elsewhere> elsewhere)?",
        "probe": rf"probe (?P<node>{NODE})",
        "shut": rf"shut(?P<gates>(?: {GATE})+)",
        "stands": rf"stands (?P<gate>{GATE})",
        "open": rf"open (?P<gate>{GATE})",
        "known": r"until the group knows (?P<step>\d+)",
        "uploaded": rf"until the store has {FIELDS}",
        "says": rf"until (?P<node>{NODE}) says (?P<text>.+)",
        "until": rf"until {FIELDS}",
        "ends": rf"ends (?P<node>{NODE}) (?P<code>\d+)",
        "hold": r"hold (?P<seconds>\d+(?:\.\d+)?)s",
        "release": r"release",
        "end": r"end(?P<codes>(?: \d+)+)",
        "cut_power": r"cut power",
        "damage": r"(?P<fault>(?:fill|lock) volume|(?:flip|truncate) newest checkpoint)",
        "order": r"storage (?P<how>answers 500|answers 503|hangs|loses answers to commits|lists what was|heals)",
        "hit_workers": r"(?P<fault>kill|starve) workers? of ranks?(?P<ranks>(?: -?\d+)+)",
        "hit_nodes": r"(?P<fault>kill|terminate|pause|cut|deafen|mute|unplug|jump|jump-back) "
        rf"(?:every node|(?:node|member)s?(?P<names>(?: {NAME})+)|nodes? of ranks?(?P<ranks>(?: -?\d+)+))",
    }.items()
}
NEEDS = {"uploaded": "store", "known": "store", "order": "store", "cut_power": "disk", "probe": "pods"}


@dataclass(frozen=True, slots=True)
class Scenario:
    """settings: `memory`, `volume` and `disk` in MiB, the number of `etcd`'s members, and 1 for
    `store` and `pods`. commands: the name of each, and its words. expected: without their `>`.
    """

    name: str
    title: str
    options: tuple[str, ...]
    within_s: float
    settings: dict[str, int]
    commands: tuple[tuple[str, dict[str, str]], ...]
    expected: tuple[str, ...]

    @property
    def nodes(self) -> int:
        """The number of nodes that the scenario starts in all."""
        return sum(int(words["nodes"]) for name, words in self.commands if name == "start")

    @property
    def has_jumps(self) -> bool:
        return any(words.get("fault", "").startswith("jump") for _, words in self.commands)


def parse(name: str, text: str) -> Scenario:
    """Raises ValueError that names the line."""
    title, within_s, expected = "", 10.0, []
    options: list[str] = []
    settings: dict[str, int] = {}
    commands = []
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
                options = shlex.split(rest)
            case "within":
                within_s = float(rest.removesuffix("s"))
            case "memory" | "volume" | "disk" | "etcd" | "store" | "pods":
                settings[word] = int(rest or 1)
            case _:
                commands.append(_command(line.strip(), settings, f"{name}, line {number}"))
    if not title or "start" not in dict(commands):
        raise ValueError(f"{name}: expected a comment that says what happens, and a line `start N`")
    read = tuple(options), within_s, settings, tuple(commands), tuple(expected)
    return Scenario(name, title, *read)


def _command(line: str, settings: dict[str, int], where: str) -> tuple[str, dict[str, str]]:
    for name, pattern in COMMANDS.items():
        if found := pattern.fullmatch(line):
            if (needed := NEEDS.get(name, "")) and needed not in settings:
                raise ValueError(f"{where}: expected this below a line `{needed}`")
            return name, {key: (word or "").strip() for key, word in found.groupdict().items()}
    raise ValueError(f"{where}: expected a command of scenario.py, found {line!r}")


def rewritten(text: str, happened: list[str]) -> str:
    """The scenario's text, with `happened` as its expected history."""
    kept = [line for line in text.splitlines() if not line.startswith(">")]
    return "\n".join([*kept, *(f"> {line}" for line in happened)]) + "\n"
