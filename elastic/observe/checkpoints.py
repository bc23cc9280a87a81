"""The newest checkpoint is what a restore would try first, unless one has rejected it since.

It follows from the events, in any order: a generation restores before it commits, so that what it
rejects and loads was committed by older ones. A rejection names a step, and not which of its
checkpoints it is about: it counts for all that older generations committed there, until a later
restore loads one of them. It does not promise that the checkpoint is still there: where all newer
ones were rejected, retention may have deleted it.
"""

from dataclasses import dataclass

from elastic.events import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointFenced,
    CheckpointRejected,
    Restored,
)
from elastic.observe.logged_event import Events, LoggedEvent, of_kind

Commit = LoggedEvent[CheckpointCommitted]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """newest: a restore would try it first, and none has rejected it since.

    saving_s: seconds of each committed save.
    """

    committed: int
    failed: int
    fenced: int
    newest: Commit | None
    saving_s: list[float]


def checkpoints(events: Events) -> Checkpoints:
    commits = of_kind(events, CheckpointCommitted)
    return Checkpoints(
        committed=len(commits),
        failed=len(of_kind(events, CheckpointFailed)),
        fenced=len(of_kind(events, CheckpointFenced)),
        newest=newest_checkpoint(events),
        saving_s=[each.event.seconds for each in commits],
    )


def newest_checkpoint(events: Events) -> Commit | None:
    """None where nothing was committed, or everything was rejected."""
    commits = of_kind(events, CheckpointCommitted)
    rejected: dict[int, int] = {}  # by step, in which generation last
    loaded: dict[int, int] = {}
    for refusal in of_kind(events, CheckpointRejected):
        step = refusal.event.step
        rejected[step] = max(refusal.generation, rejected.get(step, 0))
    for restored in of_kind(events, Restored):
        step = restored.event.step
        if restored.event.source == "checkpoint":
            loaded[step] = max(restored.generation, loaded.get(step, 0))

    def good_in(commit: Commit) -> int:
        """The last generation that wrote or loaded it."""
        return max(commit.generation, loaded.get(commit.event.step, 0))

    # A newer generation may have gone back behind a step that an older one committed.
    good = [each for each in commits if good_in(each) >= rejected.get(each.event.step, 0)]
    return max(good, key=lambda each: (good_in(each), each.event.step, each.generation), default=None)
