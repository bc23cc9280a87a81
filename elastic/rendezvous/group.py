"""A group is one frozen value, and its JSON form reads back as the same value or not at all.

It is all that the nodes of a run share: the members of the newest generation, the nodes that wait
for the next, and how the run stands. Its generation number only grows.

All nodes of a group were given the same run and the same rules, or they do not meet. The rules that
must be equal are those that every node applies to every other: who is dead (`keep_alive_s`) and how
large a generation is (`min_nodes`, `max_nodes`). With different ones, each node would undo what
another one had decided, and the group would close and form without end. How long a node waits for
others concerns that node alone, and is not compared.

It does not promise that a value is current: another node may have replaced it since it was read.
"""

import json
from dataclasses import dataclass, field
from typing import Annotated

from elastic.errors import ElasticError
from elastic.rendezvous.backends.backend import VALUE_LIMIT_BYTES
from elastic.rendezvous.partition import UnreachableReport
from elastic.system.untrusted import Count, bounds, decode, encode, exactly, pattern

FORMAT = 5
TRACEBACK_LIMIT_BYTES = 8192
MESSAGE_LIMIT = 2048
LONGEST_NAME = 255

Name = Annotated[
    str,
    # No control character, and none that reorders what a terminal shows.
    pattern(
        rf"[^\x00-\x1f\x7f-\xa0\xad\u061c\u200b-\u200f\u2028-\u202f\u205f-\u206f\ufeff\ud800-\udfff]{{0,{LONGEST_NAME}}}",
        f"a printable name of at most {LONGEST_NAME} characters",
    ),
]
_Seconds = Annotated[float, bounds(lowest=0, below=10**12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """Which run a node takes part in.

    run_id: equal for two runs that are begun with the same command; empty for a script without the
    library. uid: random, of the run directory; empty where there is none, as under torchrun. title:
    for messages only. The text of a value has the fields that are compared.
    """

    run_id: Name = ""
    uid: Name = ""
    title: Name = field(default="", compare=False, repr=False)


ANY_RUN = RunKey()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSettings:
    run: RunKey
    min_nodes: Annotated[int, bounds(lowest=1, below=10**9)]
    max_nodes: Count
    keep_alive_s: _Seconds


def refusal(theirs: SharedSettings, mine: SharedSettings) -> str:
    """Why a node with `mine` may not join the live nodes of a group with `theirs`, which differ."""
    if theirs.run.run_id != mine.run.run_id:
        return (
            f"this group is training another run: {theirs.run.title} there, {mine.run.title} here;"
            " give another --rdzv-id or --rdzv-endpoint, or stop the others first"
        )
    if theirs.run.uid != mine.run.uid:
        return (
            "the run directory is not shared: the nodes of this group have the same run in another directory"
            f" ({theirs.run.title} there, {mine.run.title} here); give all nodes a --run-dir in a folder that they share, or a URL."
            " If this is to be a run of its own, give another --rdzv-id or --rdzv-endpoint"
        )
    differences = "; ".join(
        f"{flag} {there:g}{unit} there, {here:g}{unit} here"
        for flag, unit, there, here in (
            ("--min-nodes", "", theirs.min_nodes, mine.min_nodes),
            ("--max-nodes", "", theirs.max_nodes, mine.max_nodes),
            ("--keep-alive", "s", theirs.keep_alive_s, mine.keep_alive_s),
        )
        if there != here
    )
    return (
        f"the nodes of this group were given other settings: {differences};"
        " give this node the same, or stop the others first and start all with the new ones"
    )


class GroupDamaged(ElasticError):  # noqa: N818
    """The group's state cannot be read: stop; a person removes it, which loses no training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One agent process: `id` is unique to it, so a restarted agent is another node.

    `nproc`: the number of its workers. `port`: the UDP port for probes, 0 if it takes none.
    """

    id: Name
    address: Name
    nproc: Count
    port: Annotated[int, bounds(lowest=0, below=65536)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """The error of the first worker that failed in a generation; every agent prints it last."""

    node: str
    rank: Count
    message: str
    traceback: str

    def __post_init__(self) -> None:
        # The state must stay small. The end of a traceback names the error, so the end is kept.
        tail = self.traceback.encode(errors="replace")[-TRACEBACK_LIMIT_BYTES:].decode(errors="ignore")
        object.__setattr__(self, "traceback", tail)
        object.__setattr__(self, "message", self.message[:MESSAGE_LIMIT])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How the run ended, for every node."""

    exit_code: Count
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The whole shared state. `Group()` is the one before the first node joins.

    While `open` (generation 0 never is): `members`, in rank order, train as `generation`;
    `endpoint` is "host:port" of its TCPStore; `waiting` are newcomers and spares; `cause` says why
    the generation was formed.

    While not open: `members` are those of the closed generation, less the nodes that left or died;
    `waiting` are the nodes that have stopped their workers, in order of arrival; `cause` says why
    the generation was closed.

    `done`: ids of members whose workers have all finished. `restarts`: consecutive failures without
    a step above `high_step`. `reports`: which live nodes cannot reach each other now. `settings`:
    what all these nodes were given alike, None before the first joined. `committed_step`: of the
    newest checkpoint that any of them has committed.
    """

    format: Annotated[int, exactly(FORMAT)] = FORMAT
    generation: Count = 0
    open: bool = False
    members: tuple[Node, ...] = ()
    waiting: tuple[Node, ...] = ()
    done: tuple[str, ...] = ()
    endpoint: str | None = None
    cause: str = "start"
    restarts: Count = 0
    high_step: Count = 0
    failure: WorkerFailure | None = None
    ended: RunEnd | None = None
    reports: tuple[UnreachableReport, ...] = ()
    settings: SharedSettings | None = None
    committed_step: Count = 0

    @property
    def member_ids(self) -> frozenset[str]:
        return frozenset(node.id for node in self.members)

    @property
    def waiting_ids(self) -> frozenset[str]:
        return frozenset(node.id for node in self.waiting)

    def to_json(self) -> bytes:
        return json.dumps(encode(self), indent=1).encode()

    @staticmethod
    def parse(data: bytes) -> "Group":
        """Raises GroupDamaged, naming the first field that is not what `to_json` writes."""
        try:
            if len(data) > VALUE_LIMIT_BYTES:
                raise ValueError(f"expected at most {VALUE_LIMIT_BYTES} bytes, found {len(data)}")
            group = decode(Group, data, what="group")
            _check(group)
        except ValueError as error:
            raise GroupDamaged(
                f"the rendezvous state is damaged, or another version's: {error}; stop all agents and remove the"
                f" rendezvous folder (it holds no training state), then start them again"
            ) from error
        return group


def _check(group: Group) -> None:
    """Raises ValueError for fields that contradict each other."""
    for name, nodes in (("members", group.members), ("waiting", group.waiting)):
        if len({node.id for node in nodes}) != len(nodes):
            raise ValueError(f"group.{name} names a node twice")
    if group.open and not (group.members and group.endpoint and group.generation):
        raise ValueError("an open generation needs a number, members and an endpoint")
    if group.settings is None and (group.members or group.waiting):
        raise ValueError("the nodes of a group need the settings that they share")
