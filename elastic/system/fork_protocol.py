"""The agent and its fork server exchange these messages and no others.

Each message is one JSON object on a line of its own (system/json_lines.py). They stand here because
neither side may own them: the agent must not import the worker package, so that an error in there
cannot take the supervisor down. Both ends run the same version of this library, so a message may
change without regard to older ones.
"""

from dataclasses import dataclass
from typing import Any

from elastic.system.untrusted import decode, encode

REQUEST_LIMIT_BYTES = 32 * 1024 * 1024  # arguments and environment, of which Linux takes 6 MB at most


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """From the agent. The descriptors of the worker's stdout and stderr travel with it."""

    command: tuple[str, ...]  # the recipe and its arguments
    env: dict[str, str]  # the whole environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The fork server has imported everything; sent once, before anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """One answer to a request: the worker runs."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The other answer to a request: no worker can be forked."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A worker has exited; sent at any time, also between a request and its answer."""

    pid: int
    code: int  # or minus the number of the signal that ended it


ServerMessage = Ready | Forked | Refused | Exited
_FROM_SERVER: dict[str, type[ServerMessage]] = {
    kind.__name__: kind for kind in (Ready, Forked, Refused, Exited)
}


def to_json(message: ForkRequest | ServerMessage) -> dict[str, Any]:
    """An object with one key, the name of the message."""
    return {type(message).__name__: encode(message)}


def parse_request(found: dict[str, Any]) -> ForkRequest:
    """Raises ValueError for anything else."""
    return decode(ForkRequest, found.get(ForkRequest.__name__), what="a fork request")


def parse_server_message(found: dict[str, Any]) -> ServerMessage:
    """Raises ValueError for anything else."""
    name = next(iter(found), "nothing")
    if name not in _FROM_SERVER:
        raise ValueError(f"expected one of {', '.join(_FROM_SERVER)} from the fork server, found {name:.80}")
    return decode(_FROM_SERVER[name], found[name], what=f"the fork server's {name}")
