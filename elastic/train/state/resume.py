"""A generation goes on from the newest state, or refuses: other data, or ranks with other records.

An edited recipe is only noted.
"""

from dataclasses import dataclass

from elastic.checkpoint.stop_record import StopRecord
from elastic.config.identity import new_run_from
from elastic.data.fingerprint import contents_of
from elastic.data.record import DataRecord, check_ranks, check_resume, record_of
from elastic.events import RecipeEdited, Restored, RunStarted, SettingsIgnored
from elastic.observe.log import read_rare
from elastic.observe.metrics import Metrics, Rewound
from elastic.observe.step_line import StepLine
from elastic.proof.evidence import NOTHING, Earlier
from elastic.proof.replay import Replay, begin_replay
from elastic.train import refuse
from elastic.train.loop.build import LoopParts, Rank0Output
from elastic.train.state.restore import Restorer, ResumePoint

RECIPE_DIGITS = 16  # of the sha256 of its text
MOST_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where training goes on. first_new: the first step that was never trained; rank 0 knows it.

    reported: the highest step whose line was ever written, as far as the run's files tell, where
    rank 0 has functions of run.on_step, else 0. late:
    the line of the restored step where no file had it. data: the record of the samples, for epoch
    0. replay: the steps that are done again.
    """

    point: ResumePoint
    first_new: int
    reported: int
    late: StepLine | None
    data: DataRecord
    replay: Replay


def resume(parts: LoopParts, stopped: StopRecord | None, again: Earlier = NOTHING) -> Resumed:
    """Restore the newest state on all ranks, and say what a user must know of it.

    stopped: where the recipe ended the run, if it did. again: as in `restore`. Raises UsageError
    for a recipe, data or objects that do not go on from that state, and what a restore raises.
    """
    refuse.modules(parts.state, parts.groups.device)
    parts.state.begin()  # refuses before anything is trained or written
    began_s, order, output = parts.clock.monotonic(), parts.loader.order, parts.output
    if output is not None:
        output.log.record(
            RunStarted(
                steps=order.steps,
                epochs=order.epochs,
                seed=order.seed,
                steps_per_epoch=None if order.ends is not None else order.steps_per_epoch,
                global_batch=order.global_batch,
                shards=order.shards,
            )
        )
    contents, recipe = contents_of(parts.loader.dataset), parts.identity.recipe_sha256[:RECIPE_DIGITS]
    records = parts.groups.all_gather(record_of(order, contents, recipe))
    check_ranks(records)
    now, said = records[0], ""
    point = Restorer(parts).restore(again)
    if point.data is not None:
        said = check_resume(point.data, now, point.step, new_run_from(parts.run_dir.url))
    parts.page.restored_step = point.step  # first: a step beyond it was trained here
    parts.page.set_step(parts.groups.local_rank, point.step)
    rewound, late = (Rewound(), None) if parts.metrics is None else _rewind(parts.metrics, point)
    reported = _reported(parts, rewound)  # before this generation's own event
    if output is not None:
        if said:
            print(said, flush=True)
        if point.step >= (order.steps if stopped is None else stopped.step):
            how = "has had all its steps" if stopped is None else f"was {stopped}"
            print(f"the run in {parts.run_dir.url} {how}: no step is left", flush=True)
        # Not those up to `first_new`: a fault before this one may have counted them already.
        is_again = again.step == point.step + 1 and point.divergence is None  # a step that nothing has lost
        lost_steps = 0 if is_again else max(point.step, rewound.highest) - point.step
        took_s, last_s = parts.clock.monotonic() - began_s, rewound.newest_s
        event = Restored(
            step=point.step, source=point.source, lost_steps=lost_steps, seconds=took_s, last_step_s=last_s
        )
        output.log.record(event)
        _say_what_differs(parts, output, point, recipe)
    return Resumed(
        point=point,
        first_new=max(point.step, rewound.ever) + 1,
        reported=reported,
        late=late,
        data=now,
        replay=begin_replay(parts, point, rewound, point.data or now, now),
    )


def _reported(parts: LoopParts, rewound: Rewound) -> int:
    """The events tell it of a run directory at a URL, whose older lines are gone."""
    if parts.output is None or not parts.step_functions:
        return 0
    restored = (each.event for each in read_rare(parts.run_dir.events, Restored))
    return max([rewound.ever, *(each.step + each.lost_steps for each in restored)])


def _say_what_differs(parts: LoopParts, output: Rank0Output, point: ResumePoint, recipe: str) -> None:
    """Between the restored state and the objects of this process, or the recipe's text."""
    state, step = parts.state, point.step
    if state.ignored:
        output.log.record(SettingsIgnored(step=step, settings=state.ignored))
        print(
            f"warning: the recipe now builds other settings than when the state was saved, and a resume keeps those that were saved: "
            f"{', '.join(state.ignored[:MOST_LISTED])}. To train on with the new ones, begin a new run from this one: {new_run_from(parts.run_dir.url)}"
        )
    if step > 0 and point.data is not None and point.data.recipe != recipe:
        output.log.record(RecipeEdited(step=step))
        print(
            f"note: the state of step {step} was trained by another text of the recipe than this one: what follows is no longer the trajectory of the first ({new_run_from(parts.run_dir.url)} begins another run)",
            flush=True,
        )


def _rewind(metrics: Metrics, point: ResumePoint) -> tuple[Rewound, StepLine | None]:
    """Cut the metrics back to the resumed step; also returns that step's line if none was there."""
    late, rewound = None, metrics.rewind(point.step)
    missing, is_there = rewound.missing, rewound.last is not None and rewound.last.step == point.step
    if point.line is not None and not is_there and (missing or rewound.highest == point.step - 1):
        # Rank 0 died between this step's sums and its line. Another rank's snapshot has it.
        late = point.line
        metrics.append(late)
        missing = max(0, missing - 1)
    if missing:
        print(
            f"note: metrics.jsonl has no line for {missing} of the steps up to {point.step}: the node that trained them did not"
            " write them, or cannot be read, and the state from which the run goes on came from another one",
            flush=True,
        )
    return rewound, late
