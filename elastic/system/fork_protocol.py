"""The agent and its fork server exchange these messages and no others.

Each message is one JSON object, over a connection of multiprocessing, whose pickles are not used.
They stand here because neither side may own them: `elastic.agent` must not import `elastic.worker`,
so that no code of a worker runs in the agent. Both ends run the same version of this library, so a
message may change without regard to older ones.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """All that the agent sends. The descriptors of the worker's stdout and stderr follow it,
    and that of the socket on which the worker serves the generation's store, if it does.
    """

    command: tuple[str, ...]  # the recipe and its arguments
    env: dict[str, str]  # the whole environment
    serves_store: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The fork server has imported everything; sent once, before anything else."""

    gpus: int | None  # how many torch finds; None where it imports nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """One answer to a request: the worker runs. spawned: why it was not forked; None if it was."""

    pid: int
    spawned: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The other answer to a request: no process can be started."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A worker has exited, and what it left in its session was killed; sent at any time, also
    between a request and its answer.
    """

    pid: int
    code: int  # or minus the number of the signal that ended it


# All that the fork server sends. No two messages have the same keys, so each names itself.
FromServer = Ready | Started | Refused | Exited
