"""A generation goes on from the newest state, or refuses: of another recipe, data or rank.

All that is compared with other ranks is compared here, before the first step.
"""

from contextlib import suppress
from dataclasses import dataclass

from elastic.checkpoint.stop_record import StopRecord
from elastic.data import random_streams
from elastic.data.contents import contents_of
from elastic.data.record import DataRecord, check_beginning, check_ranks, check_resume, parse, record_of
from elastic.errors import StoreFailed
from elastic.events import Restored, RunStarted, SettingsIgnored
from elastic.observe.metrics import Metrics
from elastic.storage.store import create_or_read
from elastic.system.clock import Clock
from elastic.train import as_built, refuse, restore_reasons
from elastic.train.loop_parts import LoopParts, Rank0Output
from elastic.train.restore import ResumePoint

BEGINNING = "data.json"  # in the run directory: the data that the run began with, at step 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where training goes on. first_new: the first step that was never trained; rank 0 knows it.

    data: the record of what is trained on, for epoch 0.
    """

    point: ResumePoint
    first_new: int
    data: DataRecord


def resume(parts: LoopParts, stopped: StopRecord | None) -> Resumed:
    """Restore the newest state on all ranks, and say what a user must know of it.

    stopped: where the recipe ended the run, if it did. Raises UsageError for a recipe, data or
    objects that do not go on from that state, and what a restore raises.
    """
    generators = random_streams.states()
    refuse.modules(parts.state, parts.groups.device)
    built = parts.state.begin()  # refuses before anything is trained or written
    as_built.check_alike(parts.groups.all_gather(built))
    began_s, order, output = parts.clock.monotonic(), parts.loader.order, parts.output
    if output is not None:
        sizes = {"global_batch": order.global_batch, "shards": order.shards}
        output.log.record(RunStarted(steps=order.steps, epochs=order.epochs, seed=order.seed, **sizes))
    contents = contents_of(parts.loader.dataset)
    records = parts.groups.all_gather(record_of(order, 0, contents, generators))
    check_ranks(records)
    point = parts.restorer.restore(parts.state)
    said = "" if point.data is None else check_resume(point.data, records[0], order, point.step)
    if point.data is not None and point.step:
        parts.evaluated.resume(point.data.evaluated)
        parts.frozen.resume(point.data.frozen)
    parts.page.set_step(parts.groups.local_rank, point.step)
    highest = 0 if parts.metrics is None else _rewind(parts.metrics, point)
    first_new = max(point.step, highest) + 1
    if output is not None:
        if point.step == 0:
            said = _compare_beginnings(output, records[0], parts.clock)
        if said:
            print(said, flush=True)
        if stopped is not None and point.step >= stopped.step:
            print(f"this run was {stopped}: no step is left", flush=True)
        output.checkpointing.resume(point.step, point.source)
        lost_steps, seconds = first_new - 1 - point.step, parts.clock.monotonic() - began_s
        output.log.record(
            Restored(step=point.step, source=point.source, lost_steps=lost_steps, seconds=seconds)
        )
        _report_ignored(parts, output, point.step)
    return Resumed(point=point, first_new=first_new, data=records[0])


def _compare_beginnings(output: Rank0Output, now: DataRecord, clock: Clock) -> str:
    """What to say where the run begins at step 0 once more. Data that were corrected may differ."""
    with suppress(StoreFailed, ValueError):  # an outage never stops training
        there = create_or_read(output.store, BEGINNING, now.to_json().encode(), clock)
        return check_beginning(parse(there.decode()), now)
    return ""


def _report_ignored(parts: LoopParts, output: Rank0Output, step: int) -> None:
    ignored = parts.state.ignored
    if ignored:
        output.log.record(SettingsIgnored(step=step, settings=ignored))
        print(restore_reasons.ignored(ignored, parts.restorer.run_url))


def _rewind(metrics: Metrics, resumed: ResumePoint) -> int:
    """Cut the metrics back to the resumed step; returns the highest step that they had."""
    written = metrics.rewind(resumed.step)
    if resumed.line is not None and written == resumed.step - 1:
        # Rank 0 died between this step's sums and its line. Another node's snapshot has the line.
        metrics.append(resumed.line)
    return written
