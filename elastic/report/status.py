"""What `status --json` prints of a run: where it stands now."""

from dataclasses import dataclass

from elastic import events as kinds
from elastic.observe.plain_script import PlainScript
from elastic.observe.run_view import RunView, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCheckpoint:
    step: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The fields are the keys of `status --json`, in this order; see RunView.

    steps: None until the recipe has said how long the run is.
    """

    state: str
    step: int
    steps: int | None
    generation: int
    world_size: int
    workers: list[Worker]
    last_checkpoint: LastCheckpoint | None
    stopped: kinds.Stopped | None = None
    plain: PlainScript | None = None


def status_of(view: RunView) -> Status:
    saved = view.checkpoints.newest
    return Status(
        state=view.state,
        step=view.newest.step if view.newest else 0,
        steps=view.length,
        generation=view.generation,
        world_size=view.world_size,
        workers=view.workers,
        last_checkpoint=LastCheckpoint(step=saved.step, age_s=max(0.0, view.now_s - saved.time))
        if saved
        else None,
        stopped=view.stopped,
        plain=view.plain,
    )
