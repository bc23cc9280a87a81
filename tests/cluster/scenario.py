"""A scenario is a text of commands to a group of machines; a line that cannot be read is named.

This module has the language; `scenario_runner.py` carries the commands out. Settings:

    # The first comment is the scenario's title.
    options --snapshot-every 2      options of every node; {n1}, {etcd}: addresses
    within 8                        seconds at most from a fault to the end of a new step [10]
    memory 900                      MiB that a node may use before the kernel kills a process of it
    volume 16                       size of the run's folder in MiB
    disk 64                         the run's folder is a disk of its own, of as many MiB
    etcd 3                          members e1, e2, e3 of an etcd cluster, started before the nodes
    store                           the run lies in an object store, and nodes share nothing else

Commands:

    start 3 --max-nodes 2           three nodes, which wait for each other; options of these nodes
    again n1                        when a machine has ended, run the same command on it again
    again n1 elsewhere              the same name with another address and an empty disk, as a pod
    shut 10 meet-2 load-2           close gates
    stands 10                       wait until all ranks of the newest generation wait at the gate
    open 10                         open the gate
    kill node of rank 0             inject a fault; see below
    until restored generation=2     wait for an event with these fields; node=n2: the second node
    uploaded restored               the same, for events that were uploaded to the store
    says n2 waiting                 wait until a node has printed this text
    ends n3 2                       wait until this node has ended, with this code
    probe n1                        `elastic-train status`, executed on the node, ends with 0
    hold 5                          how many seconds a fault lasts, for example a pause
    release                         end pauses and cuts, repair the volume, revive killed members
    end 0 137                       wait until all nodes have ended, with these codes in any order
    > generation 1: 2 workers, start; restored step 0 from none

Lines that begin with `>` are the history that is expected, and those with `>>` that of a sharded
run, where it is another one.

Gates: a rank waits before step 10, in generation 2 before it asks which states exist (meet-2), and
in generation 2 while it loads the state (load-2).

Faults of nodes, named as `node of rank 0`, `nodes of ranks 1 2`, `every node`, `node n1`, `members
e1 e2`: kill (SIGKILL to the container), terminate (SIGTERM to the agent), pause (all processes
stop), cut (no packet arrives or leaves), deafen (none arrives), mute (none leaves), unplug (the
network interface vanishes), jump (the wall clock goes an hour ahead), jump-back (a day back).

Faults of workers, named as `worker of rank 0` (-1 for the last rank): kill, starve (once its gate
is open, the worker takes all memory that it can get).

Faults of the shared folder: `fill volume`, `flip newest checkpoint` (one bit).

`cut power`: every node and the disk of the run's folder end at the same moment. The disk keeps only
what was written to it by then; what still lay in the memory of its file system is lost.

Faults of the object store, until `storage heals`, which first waits until a request was affected:
`storage answers 500`, `storage answers 503`, `storage hangs`, `storage loses answers` (to commits).
"""

import re
import shlex
from dataclasses import dataclass

EVENT = r"\w+( \w+=\S+)*"
FAULTS = "kill|terminate|pause|cut|deafen|mute|unplug|jump|jump-back"
# The setting that a command needs, and all that it may be.
COMMANDS = (
    ("", r"start \d+( \S+)*"),
    ("", r"again n\d+( elsewhere)?"),
    ("", r"(shut|stands|open)( (\d+|(meet|load)-\d+))+"),
    ("", rf"until {EVENT}|says n\d+ .+|ends n\d+ \d+|hold \d+(\.\d+)?|release|end( \d+)+"),
    ("", rf"({FAULTS}) (every node|(node|member)s?( [en]\d+)+|nodes? of ranks?( \d+)+)"),
    ("", r"(kill|starve) workers? of ranks?( -?\d+)+"),
    ("", r"fill volume|flip newest checkpoint"),
    ("disk", r"cut power"),
    ("", r"probe n\d+"),
    ("store", rf"uploaded {EVENT}"),
    ("store", r"storage (answers 500|answers 503|hangs|loses answers|heals)"),
)
SETTINGS = ("within", "memory", "volume", "disk", "etcd", "store")


@dataclass(frozen=True, slots=True)
class Scenario:
    """settings: by name, 1 where it has no number. commands: their words. expected, sharded:
    without `>` and `>>`.
    """

    name: str
    options: tuple[str, ...]
    settings: dict[str, int]
    commands: tuple[tuple[str, ...], ...]
    expected: tuple[str, ...]
    sharded: tuple[str, ...]

    @property
    def within(self) -> int:
        return self.settings["within"]


def parse(name: str, text: str) -> Scenario:
    """Raises ValueError that names the line."""
    has_title, options, settings = False, list[str](), {"within": 10}
    commands, expected, sharded = [], [], []
    for number, line in enumerate(text.splitlines(), start=1):
        word, _, rest = line.strip().partition(" ")
        if word == "#":
            has_title = True
        elif word == ">":
            expected.append(rest)
        elif word == ">>":
            sharded.append(rest)
        elif word == "options":
            options = shlex.split(rest)
        elif word in SETTINGS:
            settings[word] = int(rest or 1)
        elif word:
            if not any(re.fullmatch(form, line) for needs, form in COMMANDS if {needs} <= {"", *settings}):
                raise ValueError(f"{name}, line {number}: expected a command of scenario.py, found {line!r}")
            commands.append(tuple(line.split()))
    if not has_title or "start" not in {words[0] for words in commands}:
        raise ValueError(f"{name}: expected a comment that says what happens, and a line `start N`")
    return Scenario(name, tuple(options), settings, tuple(commands), tuple(expected), tuple(sharded))
