"""The agent and its fork server exchange these messages and no others.

Each message is one JSON object, over a connection of multiprocessing, whose pickles are not used.
They stand here because neither side may own them: `elastic.agent` must not import `elastic.worker`,
so that no code of a worker runs in the agent. Both ends run the same version of this library, so a
message may change without regard to older ones.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """The first request, which comes again once more is known.

    modules: installed ones that the recipe imports, beside those that every worker needs; None to
    import nothing, and to spawn every process from now on.
    """

    modules: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """The descriptors of the worker's stdout and stderr follow it, and that of the socket on which
    the worker serves the generation's store, if it does.
    """

    command: tuple[str, ...]  # the recipe and its arguments
    env: dict[str, str]  # the whole environment
    serves_store: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The answer to Preload, once all is imported."""

    gpus: int | None  # how many torch finds; None where nothing is imported


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The answer to StartRequest.

    pid: of the process, which runs; None where none can be started. reason: why not, or why it was
    not forked; None if it was.
    """

    pid: int | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A worker has exited, and what it left in its session was killed; sent at any time, also
    between a request and its answer.
    """

    pid: int
    code: int  # or minus the number of the signal that ended it


# No two messages have the same keys, so each names itself.
FromAgent = Preload | StartRequest
FromServer = Ready | Started | Exited
