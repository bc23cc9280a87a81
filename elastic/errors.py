"""The class of an error says whose fault it is and what the agent does next.

ElasticError
├─ UsageError            the user's: name what to change, exit 2, no restart
│   └─ StateNotSavable   the recipe's: an entry of its state cannot be saved without pickle
├─ StatesDiffer          ranks hold different training states: the steps since the last agreed state
│                        are done again, without a restart; that shows whose fault it is
│   └─ MachineFault      a machine computed something else than another one: the node is named
├─ RecipeNotExact        the recipe's: its result depends on more than its inputs; exit 1 at once
├─ ReplayDiffers         a step that was done again gave another result: because of the recipe, a
│                        change, or a machine; exit 1 at once, and the user decides
├─ PeerLost              another worker went away: this worker is a victim, a new generation follows
├─ Fenced                a newer generation exists: drop what this process was about to write
├─ GroupEnded            the run is over (complete or failed): leave with the run's exit code
├─ RendezvousTimeout     no generation formed in time: exit 75, the same command tries again
├─ Interrupted           a stop was requested before a generation formed: save, exit 75
├─ BackendFailed         the group's state is out of reach: workers go on, the next poll tries again
├─ GroupDamaged          the group's state cannot be read: stop; a person removes it
├─ CannotStart           this node's: it can start no process. At its start exit 1; later a failure,
│                        as of a worker
├─ CheckpointDamaged     the store's: report it, fall back to the next older checkpoint
├─ NothingLoads          a state was found and none loads: exit 76, never start over silently
│   └─ StateDoesNotFit   the recipe's: the state is whole, and its objects do not take it
└─ StoreFailed           a save fails, and training goes on; a restore or the last save: exit 1

BackendFailed is defined in rendezvous/backends/backend.py, GroupDamaged in rendezvous/group.py.
"""

from elastic.divergence import Divergence

EXIT_COMPLETE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PEER_LOST = 70  # worker to agent only: "my collective failed because a peer died"
EXIT_DIVERGED = 71  # worker to agent only: "do the steps since the last agreed state again"
EXIT_RECIPE = 72  # worker to agent only: "end the run with EXIT_FAILED, no restart mends it"
EXIT_AGAIN = 73  # worker to agent only: "start us anew, a step is done a third time"
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command resumes
EXIT_NOTHING_LOADS = 76


def shown_code(code: int) -> int:
    """The exit code of a worker as users see it: those that are for its agent only are failures."""
    return EXIT_FAILED if code in (EXIT_PEER_LOST, EXIT_DIVERGED, EXIT_RECIPE, EXIT_AGAIN) else code


class ElasticError(Exception):
    """Root of this library's errors; a process that one of them ends exits with `exit_code`."""

    exit_code = EXIT_FAILED


class UsageError(ElasticError, ValueError):
    exit_code = EXIT_USAGE


class StateNotSavable(UsageError):  # noqa: N818 - the names say it
    """An entry of a state cannot be saved without pickle."""


class StatesDiffer(ElasticError):  # noqa: N818
    """Ranks hold different training states.

    divergence: for the agents and the next workers.
    """

    exit_code = EXIT_DIVERGED

    def __init__(self, message: str, divergence: Divergence | None = None) -> None:
        super().__init__(message)
        self.divergence = divergence


class MachineFault(StatesDiffer):
    """A machine computed something else than another one from the same inputs.

    divergence: names the nodes `at_fault`.
    """


class RecipeNotExact(ElasticError):  # noqa: N818
    """The recipe's result depends on more than its inputs, so that no restart makes it exact."""

    exit_code = EXIT_RECIPE


class ReplayDiffers(ElasticError):  # noqa: N818
    """A step that was done again from a restored state gave another result than the first time."""

    exit_code = EXIT_RECIPE


class PeerLost(ElasticError):  # noqa: N818
    exit_code = EXIT_PEER_LOST


class Fenced(ElasticError):  # noqa: N818
    """A newer generation exists, without this node."""


class GroupEnded(ElasticError):  # noqa: N818
    """The run of the group that this node joins is over."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class RendezvousTimeout(ElasticError):  # noqa: N818
    """The group or its backend was not ready in time."""

    exit_code = EXIT_INTERRUPTED


class Interrupted(ElasticError):  # noqa: N818
    """The caller stopped waiting for a generation."""

    exit_code = EXIT_INTERRUPTED

    def __init__(self) -> None:
        super().__init__("interrupted while waiting for a generation")


class CannotStart(ElasticError):  # noqa: N818
    """A process cannot be started, for want of memory, of processes or of open files."""


class CheckpointDamaged(ElasticError):  # noqa: N818
    """A committed checkpoint cannot be loaded."""


class NothingLoads(ElasticError):  # noqa: N818
    exit_code = EXIT_NOTHING_LOADS


class StateDoesNotFit(NothingLoads):
    """A state is whole and is that of other objects than the recipe has."""


class StoreFailed(ElasticError):  # noqa: N818
    """The storage did not do what it was asked for."""
