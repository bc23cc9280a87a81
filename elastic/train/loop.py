"""The loop hides resume, saves and drains behind an iterator: the recipe sees one step after another and nothing else.

After each step every rank knows the same: the loss, whether to save, whether to stop. What a step leaves behind, in this order: its line in the metrics,
its number on the control page, the state handed to the uploader when a save is due. A drain ends the process with the interrupted exit code once the
checkpoint of its last step is committed.
"""

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elastic.checkpoint.store import Store
from elastic.clock import Clock
from elastic.control_page import ControlPage
from elastic.data.loader import Batch, Loader
from elastic.data.order import Order
from elastic.errors import EXIT_INTERRUPTED, StoreFailed, UsageError
from elastic.events import Drained, FirstStep, Restored, RunStarted
from elastic.faults.inject import Faults
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
from elastic.reduce.exchange import Exchange
from elastic.reduce.gradients import Gradients
from elastic.train.agreement import agree
from elastic.train.buffers import Buffers
from elastic.train.placement import on_device
from elastic.train.restore import Loaded, restore
from elastic.train.saving import Point, Saving
from elastic.train.state import State
from elastic.train.step import Outcome, Requests, Shards, Step
from elastic.train.world import World

FINAL_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Diary:
    """What rank 0 alone writes."""

    log: EventLog
    metrics: Metrics
    saving: Saving


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the loop stands in; `diary` is None on every rank but the first, `page` without an agent, `faults` without a plan."""

    world: World
    store: Store
    clock: Clock
    generation: int
    diary: Diary | None
    page: ControlPage
    faults: Faults | None


class Loop:
    def __init__(self, around: Surroundings, order: Order, loader: Loader, state: State) -> None:
        world = around.world
        self._around = around
        self._order = order
        self._loader = loader
        self._state = state
        self._exchange = Exchange(
            shards=order.shards, world_size=world.size, rank=world.rank, group=world.group
        )
        self._chain = ""
        self._started_at = 0.0
        self._first_new = 0  # the first step that no generation has trained before; rank 0 knows it
        self.digest = ""

    def run(self) -> Iterator[Step]:
        """The steps that are left. Raises SystemExit at a drain; StoreFailed when the last state cannot be saved."""
        loaded = self._begin()
        gradients = Gradients(self._state.trained, self._exchange)
        shards = Shards(
            exchange=self._exchange,
            gradients=gradients,
            buffers=Buffers(self._state.modules, self._order.shards, self._around.world.device),
            device=self._around.world.device,
            seed=self._order.seed,
        )
        batches = self._loader.load(self._exchange.leaves, loaded.step + 1)
        for number in range(loaded.step + 1, self._order.steps + 1):
            self._started_at = self._around.clock.monotonic()
            step = self._step(number, shards, batches)
            yield step
            self._finish(step)
        gradients.close()
        self._end(loaded)

    def _begin(self) -> Loaded:
        world, diary, order = self._around.world, self._around.diary, self._order
        began_at = self._around.clock.monotonic()
        if diary is not None:
            about = {"steps": order.steps, "epochs": order.epochs, "seed": order.seed}
            diary.log.record(RunStarted(**about, global_batch=order.global_batch, shards=order.shards))
        loaded = restore(
            world,
            self._around.store,
            self._state,
            diary.log if diary is not None else None,
            self._around.clock,
        )
        self.digest = agree(world, self._state.take_apart(), f"before step {loaded.step + 1}")
        self._chain = loaded.chain
        self._around.page.set_step(world.local_rank, loaded.step)
        if diary is not None:
            diary.saving.resumed_from = loaded.step or None
            lost = max(0, diary.metrics.rewind(loaded.step) - loaded.step)
            self._first_new = loaded.step + lost + 1
            seconds = self._around.clock.monotonic() - began_at
            diary.log.record(
                Restored(step=loaded.step, source=loaded.source, lost_steps=lost, seconds=seconds)
            )
        return loaded

    def _step(self, number: int, shards: Shards, batches: Iterator[Batch]) -> Step:
        own: list[Batch] = []
        for _ in self._exchange.leaves:
            batch = next(batches)
            batch.data = on_device(batch.data, shards.device)
            own.append(batch)
        step = Step(
            number=number,
            steps=self._order.steps,
            epoch=self._order.place(number)[0],
            shards=shards,
            batches=own,
            requests=lambda: self._requests(number),
            global_batch=self._order.global_batch,
        )
        if self._around.faults is not None:
            faults = self._around.faults
            step.reached = lambda point: faults.reach(point, number)
        return step

    def _requests(self, number: int) -> Requests:
        diary = self._around.diary
        save = diary is not None and number < self._order.steps and diary.saving.is_due(number)
        return Requests(drain=self._around.page.drain, save=save)

    def _finish(self, step: Step) -> None:
        outcome = step.outcome
        if outcome is None:
            raise UsageError(
                f"step {step.number} ended without gradients: expected step.backward(loss) or step.mean_loss(...) in the body of the loop"
            )
        step.reached("optimizer")
        self._chain = _link(self._chain, outcome)
        if self._around.diary is not None:
            self._write_down(self._around.diary, step, outcome)
        self._around.page.set_step(self._around.world.local_rank, step.number)
        if step.number == self._order.steps:
            return
        if outcome.drain:
            self._drain(step)
        elif outcome.save:
            self._save(step.number, step.epoch, final=False)

    def _write_down(self, diary: Diary, step: Step, outcome: Outcome) -> None:
        line: dict[str, Any] = {
            "step": step.number,
            "epoch": step.epoch,
            "loss": outcome.loss,
            "chain": self._chain[:16],
            "world_size": self._around.world.size,
            "generation": self._around.generation,
            "time": self._around.clock.wall(),
            "seconds": self._around.clock.monotonic() - self._started_at,
        }
        diary.metrics.append(step.logged | line)
        if step.number == self._first_new:
            diary.log.record(FirstStep(step=step.number))

    def _save(self, number: int, epoch: int, *, final: bool) -> None:
        began_at = self._around.clock.monotonic()
        parts = self._state.take_apart()
        self.digest = agree(self._around.world, parts, f"after step {number}")
        if self._around.diary is not None:
            # The metrics of a step must not be lost where its checkpoint is kept.
            self._around.diary.metrics.sync()
            point = Point(step=number, epoch=epoch, digest=self.digest, chain=self._chain)
            self._around.diary.saving.save(parts, point, began_at=began_at, final=final)

    def _drain(self, step: Step) -> None:
        problem = self._save_and_wait(step.number, step.epoch)
        if self._around.diary is not None:
            self._around.diary.log.record(Drained(step=step.number, committed=not problem))
        self._around.world.close()
        if problem:
            raise StoreFailed(f"stopped after step {step.number}, which could not be saved: {problem}")
        raise SystemExit(EXIT_INTERRUPTED)

    def _save_and_wait(self, number: int, epoch: int) -> str:
        """Save what no later save will make good, and see it committed; returns what went wrong, or nothing."""
        problem = ""
        for _ in range(FINAL_TRIES):
            self._save(number, epoch, final=True)
            problem = self._commit(number)
            if not problem:
                break
        return problem

    def _commit(self, number: int) -> str:
        """Every rank learns whether rank 0's save of this step is committed; returns what went wrong."""
        diary = self._around.diary
        return str(self._around.world.from_first(diary.saving.wait(number) if diary is not None else ""))

    def _end(self, loaded: Loaded) -> None:
        last = self._order.steps
        if loaded.step == last:
            return
        problem = self._save_and_wait(last, self._order.epochs - 1)
        if problem:
            raise StoreFailed(f"trained to the last step, {last}, which could not be saved: {problem}")


def _link(chain: str, outcome: Outcome) -> str:
    """The next value of the chain: sha256 over the one before, the loss and the gradient norms, as bits."""
    # One NaN, whatever bits it has: which of two is kept by an addition depends on their order.
    numbers = [
        math.nan if math.isnan(number) else number for number in (outcome.loss, *outcome.gradient_norms)
    ]
    return hashlib.sha256(bytes.fromhex(chain) + struct.pack(f"<{len(numbers)}d", *numbers)).hexdigest()
