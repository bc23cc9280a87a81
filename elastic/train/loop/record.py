"""A step that counts has one line in the metrics; its state has beside it what a resume needs."""

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from elastic.data.record import record_of
from elastic.events import FirstStep, LoggedByRank
from elastic.observe.log import read_rare
from elastic.observe.slow_ranks import Tally
from elastic.observe.step_line import CHAIN_DIGITS, StepLine
from elastic.proof import logged_numbers
from elastic.proof.logged_numbers import LoggedNumbers
from elastic.proof.replay_check import ReplayCheck
from elastic.snapshot.slots import SnapshotInfo
from elastic.train.groups import ProcessGroups
from elastic.train.loop.parts import LoopParts
from elastic.train.state.resume import Resumed
from elastic.train.step.contract import Contract
from elastic.train.step.parts import StepOutcome
from elastic.train.step.step import Step

_DIGITS = 6  # of seconds
_LOOK_EVERY = 50  # steps, for ranks that are slow


class StepRecorder:
    """Keeps the chain value from step to step."""

    def __init__(self, parts: LoopParts, resumed: Resumed) -> None:
        self._parts = parts
        self._chain = resumed.point.chain
        self._first_new = resumed.first_new
        self._began_with = resumed.data
        self._data = -1, resumed.data  # an epoch, and what stands beside a state of it
        self._text = ""  # of that
        log = None if parts.output is None else parts.output.log
        self._replay = ReplayCheck(resumed.replay, parts.restorer.run_url, log)
        self._logged = LoggedNumbers()
        self._said = set[str]()
        self._pace, self._slow = Tally(), set[int]()
        self._late = resumed.late
        parts.step_functions.reported, parts.step_functions.lost = resumed.reported, resumed.lost
        self._began_s = self._opened_s = parts.clock.monotonic()
        self._evaluated_s = 0.0

    def begin(self, contract: Contract) -> None:
        """Report the restored step, if it has its line only now. contract: of the loop."""
        self._contract = contract
        if self._late is not None:
            self._report(self._late)
        self._began_s = self._parts.clock.monotonic()

    def open(self) -> None:
        """A step begins: what came before, such as a save, is no part of it."""
        self._opened_s, self._evaluated_s = self._parts.clock.monotonic(), 0.0

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """An evaluation in the body of a step is no part of it either."""
        begin_s = self._parts.clock.monotonic()
        try:
            yield
        finally:
            self._evaluated_s += self._parts.clock.monotonic() - begin_s

    def record(self, step: Step, outcome: StepOutcome, groups: ProcessGroups) -> SnapshotInfo:
        """Write the step's line into the metrics; returns what stands beside the step's state.

        groups: those that are open now. Raises ReplayDiffers for a step that is done again and
        gives another result, before anything is written.
        """
        parts = self._parts
        step.has_line = True
        self._chain = _next_chain(self._chain, outcome)
        now_s = parts.clock.monotonic()
        line = StepLine(
            step=step.number,
            epoch=step.epoch,
            loss=step.logged.get("loss", outcome.loss),
            chain=self._chain[:CHAIN_DIGITS],
            world_size=parts.groups.world_size,
            generation=parts.generation,
            time=parts.clock.wall(),
            seconds=max(0.0, now_s - self._opened_s - self._evaluated_s),
            audited=None if step.audit is None else True,
            **slowest_of(outcome.own_s, outcome.shards),
            values=step.logged,
        )
        self._replay.check(line, groups)
        if parts.metrics is not None:
            parts.metrics.append(line)
            parts.page.lines_wait = parts.metrics.waits
        # At once: a peer that is lost in what follows must not leave a step that has its line, and
        # was reported to no tracker.
        self._report(line)
        self._logged.add(step.number, step.logged)
        if groups.world_size > 1 and self._logged.is_due(is_last=step.number == step.steps):
            self._compare_logged(step.number, groups)
        if parts.trace is not None:
            parts.trace.add(line, parts.state.flatten(), step)
        if parts.output is not None:
            seconds = now_s - self._began_s  # of all that a step takes the loop
            parts.output.schedule.add_step(seconds)
            parts.output.audits.add_step(seconds, None if step.audit is None else step.audit.cost_s)
            if step.number == self._first_new:
                parts.output.log.record(FirstStep(step=step.number))
            self._note_slow_ranks(line)
        self._began_s = parts.clock.monotonic()
        return self.info(step.number, step.epoch, line)

    def _note_slow_ranks(self, line: StepLine) -> None:
        """Each once in a generation, on the console."""
        self._pace.add_line(line)
        if line.step % _LOOK_EVERY == 0:
            for rank, cost_s in self._pace.costs_s().items():
                if rank not in self._slow:
                    self._slow.add(rank)
                    print(
                        f"note: rank {rank} is slower than the others, which have waited for it for {cost_s / self._pace.seconds:.0%}"
                        f" of the time since this generation began; elastic-train report {self._parts.restorer.run_url} names its node",
                        flush=True,
                    )

    def _report(self, line: StepLine) -> None:
        """To the functions of run.on_step; no tracker wants the steps of `elastic-train check`."""
        parts = self._parts
        if parts.output is not None and parts.trace is None and parts.step_functions:
            parts.step_functions.report(line, parts.heartbeat, parts.output.log, self._contract.mark)

    def _compare_logged(self, step: int, groups: ProcessGroups) -> None:
        """Name numbers that are others on other ranks. Raises PeerLost."""
        found = logged_numbers.differing(groups.all_gather(self._logged.take()))
        output = self._parts.output
        if output is None or not found.keys() - self._said:
            return
        known = read_rare(output.events, LoggedByRank) if self._parts.generation > 1 else []
        self._said.update(name for each in known for name in each.event.names)
        new = {name: found[name] for name in found if name not in self._said}
        self._said |= found.keys()
        if new:
            output.log.record(LoggedByRank(step=step, names=list(new)))
            print(note := logged_numbers.note(new, step), flush=True)
            if self._parts.trace is not None:
                self._parts.trace.note(note)

    def info(self, step: int, epoch: int, line: StepLine | None) -> SnapshotInfo:
        """line: the step's own, None where it has none."""
        return SnapshotInfo(
            step=step,
            epoch=epoch,
            generation=self._parts.generation,
            world_size=self._parts.groups.world_size,
            torch=torch.__version__,
            chain=self._chain,
            line=None if line is None else line.to_json(),
            data=self._data_of(epoch),
        )

    def _data_of(self, epoch: int) -> str:
        if self._data[0] != epoch:  # once in an epoch, and not in each step
            known = self._began_with
            record = record_of(self._parts.loader.order, epoch, known.contents, known.recipe)
            self._data = epoch, record
            self._text = self._data[1].to_json()
        return self._text


def slowest_of(own_s: Sequence[float], shards: Sequence[int]) -> dict[str, Any]:
    """The fields of a line; none where nothing was measured. own_s, shards: of each rank.

    A rank that has more shards than others is slow by no fault of its machine: the others count as
    if they had as many, at their own pace. One without a shard shows no pace.
    """
    if not own_s:
        return {}
    slowest = max(range(len(own_s)), key=own_s.__getitem__)
    others_s = [
        seconds * max(1.0, shards[slowest] / shards[rank])
        for rank, seconds in enumerate(own_s)
        if rank != slowest and shards[rank]
    ]
    if not others_s:
        return {}
    return {
        "slowest_rank": slowest,
        "slowest_s": round(own_s[slowest], _DIGITS),
        "others_s": round(median(others_s), _DIGITS),
    }


def _next_chain(chain: str, outcome: StepOutcome) -> str:
    """sha256 over the chain so far, the loss and the gradient norms, as bits."""
    # All NaNs become one: which of two NaNs an addition passes on depends on their order.
    numbers = [
        math.nan if math.isnan(number) else number for number in (outcome.loss, *outcome.gradient_norms)
    ]
    return hashlib.sha256(bytes.fromhex(chain) + struct.pack(f"<{len(numbers)}d", *numbers)).hexdigest()
