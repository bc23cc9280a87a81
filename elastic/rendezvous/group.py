"""A group is one frozen value, its generation number only grows, and its JSON form reads back as
the same value or not at all.

It does not promise that a value is current: whoever read it may be holding yesterday's.
"""

import json
from dataclasses import dataclass, field
from typing import Annotated

from elastic.errors import ElasticError
from elastic.rendezvous.backends.backend import VALUE_LIMIT_BYTES
from elastic.rendezvous.partition import UnreachableReport
from elastic.system.untrusted import Count, Rule, bounds, decode, encode, exactly

FORMAT = 3
TRACEBACK_LIMIT_BYTES = 8192
MESSAGE_LIMIT = 2048
LONGEST_NAME = 255

_Name = Annotated[
    str,
    Rule(
        lambda text: text.isprintable() and len(text) <= LONGEST_NAME,
        f"a printable name of at most {LONGEST_NAME} characters",
    ),
]


class GroupDamaged(ElasticError):  # noqa: N818 - the name says what is wrong, as elsewhere in the tree of errors
    """The shared state of the rendezvous cannot be read: stop; a person removes it, which loses no training state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One agent process. `id` belongs to that process alone; `nproc` is the number of its workers; `port` is where it can be called, 0 for nowhere."""

    id: _Name
    address: _Name
    nproc: Count
    port: Annotated[int, bounds(lowest=0, below=65536)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What the first failing worker of a generation said, for the agents that print it last.

    `from_outside`: it was ended by SIGKILL, which nothing that it computed can have done.
    """

    node: str
    rank: Count
    message: str
    traceback: str
    from_outside: bool = False

    def __post_init__(self) -> None:
        # The end of a traceback names the error; its beginning is only the way there.
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
    """The whole shared state.

    While `open`, `members` (in rank order) train as `generation` and meet at `endpoint`,
    "host:port" of its TCPStore. While not open, `members` are those of the generation that was
    closed, less those who left, and `waiting` are those who stopped their workers, in order of
    arrival. `restarts` counts consecutive failures without a step above `high_step`. `cause` says
    why this generation exists (open) or why it ended (not open). `reports` say which nodes that
    answer here are out of reach of each other now.
    """

    format: Annotated[int, exactly(FORMAT)] = FORMAT
    generation: Count
    open: bool
    members: tuple[Node, ...]
    waiting: tuple[Node, ...]
    done: tuple[str, ...]
    endpoint: str | None
    cause: str
    restarts: Count
    high_step: Count
    failure: Failure | None
    ended: RunEnd | None
    # The file keeps the key of the first version that wrote it.
    reports: tuple[UnreachableReport, ...] = field(default=(), metadata={"key": "complaints"})

    @staticmethod
    def empty() -> "Group":
        """Before anybody came; generation 0 is never open."""
        return Group(
            generation=0,
            open=False,
            members=(),
            waiting=(),
            done=(),
            endpoint=None,
            cause="start",
            restarts=0,
            high_step=0,
            failure=None,
            ended=None,
        )

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
