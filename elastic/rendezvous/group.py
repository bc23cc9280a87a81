"""A group is one frozen value, its generation number only grows, and its JSON form reads back as the same value or not at all.

It does not promise that a value is current: whoever read it may be holding yesterday's.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from elastic.errors import ElasticError
from elastic.rendezvous.partition import UnreachableReport
from elastic.system.untrusted import parse_json

FORMAT = 3
TRACEBACK_LIMIT_BYTES = 8192
MESSAGE_LIMIT = 2048
STATE_LIMIT_BYTES = 4 * 1024 * 1024
LARGEST = 10**12
LONGEST_NAME = 255
LAST_PORT = 65535


class GroupDamaged(ElasticError):  # noqa: N818 - the name says what is wrong, as elsewhere in the tree of errors
    """The shared state of the rendezvous cannot be read: stop; a person removes it, which loses no training state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One agent process. `id` belongs to that process alone; `nproc` is the number of its workers; `port` is where it can be called, 0 for nowhere."""

    id: str
    address: str
    nproc: int
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What the first failing worker of a generation said, for the agents that print it last.

    `from_outside`: it was ended by SIGKILL, which nothing that it computed can have done.
    """

    node: str
    rank: int
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

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The whole shared state.

    While `open`, `members` (in rank order) train as `generation` and meet at `endpoint`, "host:port" of its TCPStore.
    While not open, `members` are those of the generation that was closed, less those who left, and `waiting` are those
    who stopped their workers, in order of arrival. `restarts` counts consecutive failures without a step above
    `high_step`. `cause` says why this generation exists (open) or why it ended (not open). `reports` say which nodes
    that answer here are out of reach of each other now.
    """

    generation: int
    open: bool
    members: tuple[Node, ...]
    waiting: tuple[Node, ...]
    done: tuple[str, ...]
    endpoint: str | None
    cause: str
    restarts: int
    high_step: int
    failure: Failure | None
    ended: RunEnd | None
    reports: tuple[UnreachableReport, ...] = ()

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
        record = {"format": FORMAT} | asdict(self)
        # The file keeps the names of the first version that wrote it.
        record["complaints"] = [
            {"node": one["node"], "unheard": one["peers"]} for one in record.pop("reports")
        ]
        return json.dumps(record, indent=1).encode()

    @staticmethod
    def parse(data: bytes) -> "Group":
        """Raises GroupDamaged, naming the first field that is not what `to_json` writes."""
        try:
            if len(data) > STATE_LIMIT_BYTES:
                raise ValueError(f"it has {len(data)} bytes, more than {STATE_LIMIT_BYTES}")
            return _group(parse_json(data))
        except ValueError as error:
            raise GroupDamaged(
                f"the rendezvous state should be JSON of format {FORMAT}, but {error}; stop all agents and remove the"
                f" rendezvous folder (it holds no training state), then start them again"
            ) from error


_NODE_FIELDS = {"id": str, "address": str, "nproc": int, "port": int}
_REPORT_FIELDS = {"node": str, "unheard": list}
_FAILURE_FIELDS = {"node": str, "rank": int, "message": str, "traceback": str, "from_outside": bool}
_VERDICT_FIELDS = {"exit_code": int, "reason": str}
_GROUP_FIELDS = {
    "format": int,
    "generation": int,
    "open": bool,
    "members": list,
    "waiting": list,
    "done": list,
    "endpoint": (str, type(None)),
    "cause": str,
    "restarts": int,
    "high_step": int,
    "failure": (dict, type(None)),
    "ended": (dict, type(None)),
    "complaints": list,
}


def _fields(record: object, types: dict[str, Any], what: str) -> dict[str, Any]:
    """`record` as a dict that has exactly these fields, of these types."""
    if not isinstance(record, dict) or set(record) != set(types):
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{what} should have the fields {sorted(types)}, found {found!s:.200}")
    for name, kind in types.items():
        # To Python, True is an int; to the format it is not.
        if not isinstance(record[name], kind) or (kind is int and isinstance(record[name], bool)):
            raise ValueError(f"{what}.{name} has the wrong type: {record[name]!r:.80}")
        if kind is int and not 0 <= record[name] < LARGEST:
            raise ValueError(f"{what}.{name} is negative or too large: {record[name]!r:.80}")
    return record


def _ids(found: list[object], what: str) -> tuple[str, ...]:
    if not all(isinstance(each, str) for each in found):
        raise ValueError(f"{what} should be a list of node ids")
    return tuple(each for each in found if isinstance(each, str))


def _report(record: object) -> UnreachableReport:
    fields = _fields(record, _REPORT_FIELDS, "group.complaints")
    return UnreachableReport(node=fields["node"], peers=_ids(fields["unheard"], "group.complaints.unheard"))


def _nodes(records: list[object], what: str) -> tuple[Node, ...]:
    nodes = tuple(Node(**_fields(record, _NODE_FIELDS, what)) for record in records)
    for name in (name for node in nodes for name in (node.id, node.address)):
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise ValueError(f"{what} has a name that no node gives itself: {name!r:.80}")
    for node in nodes:
        if node.port > LAST_PORT:
            raise ValueError(f"{what} has a port that none can be: {node.port}")
    if len({node.id for node in nodes}) != len(nodes):
        raise ValueError(f"{what} names a node twice")
    return nodes


def _group(record: object) -> Group:
    if isinstance(record, dict) and record.get("format") != FORMAT:
        raise ValueError(f"its format is {record.get('format')!r:.80} (was it written by another version?)")
    fields = dict(_fields(record, _GROUP_FIELDS, "group"))
    del fields["format"]
    if fields["open"] and not (fields["members"] and fields["endpoint"] and fields["generation"]):
        raise ValueError("an open generation needs a number, members and an endpoint")
    failure, ended, reports = fields["failure"], fields["ended"], fields.pop("complaints")
    return Group(
        **fields
        | {
            "members": _nodes(fields["members"], "group.members"),
            "waiting": _nodes(fields["waiting"], "group.waiting"),
            "done": _ids(fields["done"], "group.done"),
            "reports": tuple(_report(each) for each in reports),
            "failure": None
            if failure is None
            else Failure(**_fields(failure, _FAILURE_FIELDS, "group.failure")),
            "ended": None if ended is None else RunEnd(**_fields(ended, _VERDICT_FIELDS, "group.ended")),
        }
    )
