"""Every error says whose fault it is and what the agent does next; the class is the recovery table.

ElasticError
├─ UsageError            the person's: say what to change, exit 2, nothing written
│   └─ StateNotSavable   the recipe's: an entry of its state cannot be kept without pickle
├─ StatesDiffer          ranks disagree about the training state: stop, exit 1 (a bug or bad hardware)
├─ PeerLost              another worker went away: this one is a victim; a new generation follows
├─ Fenced                a newer generation exists: whatever this process was about to write is dropped
├─ GroupEnded            the run is over (complete, failed): the agent leaves with its exit code
├─ RendezvousTimeout     no generation formed in time: the agent leaves, exit 75, the same command tries again
├─ Interrupted           a stop was requested while the agent waited for a generation: it saves its state and leaves, exit 75
├─ BackendFailed         the group's state cannot be reached: workers go on, the next poll tries again  (rendezvous.backends.backend)
├─ GroupDamaged          the group's state cannot be read: stop; a person removes it  (rendezvous.group)
├─ CheckpointDamaged     the store's: report it, fall back to the next older checkpoint
├─ NothingLoads          commit records exist and none loads: stop, exit 76, never start over silently
└─ StoreFailed           the store's: a save is reported as failed, training goes on
"""

EXIT_COMPLETE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PEER_LOST = 70  # worker to agent only: "my collective broke because somebody else died"
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command resumes
EXIT_NOTHING_LOADS = 76


class ElasticError(Exception):
    """Root of this library's errors; `exit_code` is what a process that dies of it exits with."""

    exit_code = EXIT_FAILED


class UsageError(ElasticError, ValueError):
    exit_code = EXIT_USAGE


class StateNotSavable(UsageError):  # noqa: N818 - the name says what is wrong, not that it is an error
    pass


class StatesDiffer(ElasticError):  # noqa: N818
    pass


class PeerLost(ElasticError):  # noqa: N818
    exit_code = EXIT_PEER_LOST


class Fenced(ElasticError):  # noqa: N818
    pass


class GroupEnded(ElasticError):  # noqa: N818
    """Raised to a node that meets a group whose run is over."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class RendezvousTimeout(ElasticError):  # noqa: N818
    """The group or its backend was not ready in time."""

    exit_code = EXIT_INTERRUPTED


class Interrupted(ElasticError):  # noqa: N818
    """The caller asked to stop waiting for a generation; `others`: whether other nodes are left in the group."""

    exit_code = EXIT_INTERRUPTED

    def __init__(self, *, others: bool) -> None:
        super().__init__("interrupted while waiting for a generation")
        self.others = others


class CheckpointDamaged(ElasticError):  # noqa: N818
    pass


class NothingLoads(ElasticError):  # noqa: N818
    exit_code = EXIT_NOTHING_LOADS


class StoreFailed(ElasticError):  # noqa: N818
    pass
