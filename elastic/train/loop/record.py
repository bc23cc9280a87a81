"""A step that counts has one line in the metrics; its state has beside it what a resume needs.

Two kinds of notes on the recipe are printed here, once: exact results that are perhaps not meant,
and logged numbers that differ between ranks.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from elastic.events import FirstStep, LoggedByRank
from elastic.observe.log import read_rare
from elastic.observe.step_line import CHAIN_DIGITS, StepLine
from elastic.proof.evidence import Evidence, differences
from elastic.proof.replay import ReplayCheck
from elastic.snapshot.slots import SnapshotInfo
from elastic.train.loop.build import LoopParts
from elastic.train.state.resume import Resumed
from elastic.train.state.state import State
from elastic.train.step.parts import StepOutcome
from elastic.train.step.step import Step

_DIGITS = 6  # of seconds
_NAMED = 3


class StepRecorder:
    """Writes the line of each step, with the chain value that goes on from step to step.

    opened_s: when the open step began, on the monotonic clock.
    """

    def __init__(self, parts: LoopParts, resumed: Resumed, mark: Callable[[], object]) -> None:
        """mark: of the trained parameters, which functions of run.on_step must not change."""
        self._parts = parts
        self._chain = resumed.point.chain
        self._resumed = resumed
        self._data = resumed.data.to_json()
        log = None if parts.output is None else parts.output.log
        known = [] if log is None else read_rare(parts.run_dir.events, LoggedByRank)
        self._replay = ReplayCheck(resumed.replay, parts.run_dir.url, log)
        self._said = {name for each in known for name in each.event.names}
        self._mark = mark
        parts.step_functions.reported = resumed.reported
        if resumed.late is not None:  # the restored step has its line only now
            self._report(resumed.late)
        self._began_s = self.opened_s = parts.clock.monotonic()
        self.evaluated_s = 0.0  # in the body of the step, and no part of it either

    def open(self) -> None:
        """A step begins: what came before, such as a save, is no part of it."""
        self.opened_s, self.evaluated_s = self._parts.clock.monotonic(), 0.0

    def record(self, step: Step, outcome: StepOutcome) -> StepLine:
        """Write the step's line into the metrics.

        Raises ReplayDiffers for a step that is done again and gives another result, before anything
        is written.
        """
        parts, output, number = self._parts, self._parts.output, step.number
        step.has_line = True
        self._chain = _next_chain(self._chain, outcome)
        now_s = parts.clock.monotonic()
        line = StepLine(
            step=number,
            epoch=step.epoch,
            loss=step.logged.get("loss", outcome.loss),
            chain=self._chain[:CHAIN_DIGITS],
            world_size=parts.groups.world_size,
            generation=parts.link.generation,
            time=parts.clock.wall(),
            seconds=max(0.0, now_s - self.opened_s - self.evaluated_s),
            audited=None if step.audit is None else True,
            **(slowest_of(outcome.own_s, outcome.shards) if outcome.own_s else {}),
            values=step.logged,
        )
        if self._replay.steps:
            self._replay.check(line, parts.groups)
        if parts.metrics is not None:
            parts.metrics.append(line)
        # At once: a peer that is lost in what follows must not leave a step that has its line, and
        # was reported to no tracker.
        if parts.step_functions:
            self._report(line)
        if number == step.steps or not number & (number - 1):  # 1, 2, 4, 8 … and the last
            self._say_once(step)
        if parts.trace is not None:
            found = parts.again.collected.end(parts.groups, outcome.loss, parts.state.evidence())
            parts.trace.add(line, found, steps=step.steps, shards=step.shards)
        if output is not None:
            seconds = now_s - self._began_s  # of all that a step takes the loop
            output.schedule.add_step(seconds)
            output.audits.add_step(seconds, is_audited=step.audit is not None)
            if number == self._resumed.first_new:
                output.log.record(FirstStep(step=number))
        self._began_s = now_s
        return line

    def _report(self, line: StepLine) -> None:
        """To the functions of run.on_step; no tracker wants the steps of `elastic-train check`."""
        parts = self._parts
        if parts.output is not None and parts.trace is None:
            parts.step_functions.report(line, parts.heartbeat, parts.output.log, self._mark)

    def _say_once(self, step: Step) -> None:
        """What the user should know of this step. Raises PeerLost."""
        parts, found = self._parts, list[str]()
        if step.number == 1:
            found += first_step_notes(parts.state, list(dict.fromkeys(step.averaged)), step.shards)
        if new := self._logged_otherwise(step):
            self._said |= new
            found.append(
                f"note: the ranks have logged other numbers for {', '.join(sorted(new))}, and the metrics have those of rank 0: a number of the batch comes from "
                "step.sum, one of other data from run.evaluate. What each worker measures of itself may stay"
            )
            if parts.output is not None:
                parts.output.log.record(LoggedByRank(step=step.number, names=sorted(new)))
        for note in found:
            if parts.output is not None:
                print(note, flush=True)
            if parts.trace is not None:
                parts.trace.note(note)

    def _logged_otherwise(self, step: Step) -> set[str]:
        """New names of numbers that ranks log differently.

        Rank 0 alone writes metrics: a number of its own shards would stand there for the batch.
        """
        if self._parts.groups.world_size == 1:
            return set()
        mine = {name: repr(value) for name, value in step.logged.items() if isinstance(value, int | float)}
        of_ranks = self._parts.groups.all_gather(Evidence(mine))
        # What only one rank logs is its own business.
        shared = set(mine).intersection(*(each.entries for each in of_ranks))
        return shared & set(differences(*of_ranks)) - self._said

    def info(self, step: int, line: StepLine | None = None) -> SnapshotInfo:
        """What stands beside the state after a step; line: the step's, None where it has none."""
        return SnapshotInfo(
            step=step,
            generation=self._parts.link.generation,
            chain=self._chain,
            line=None if line is None else line.to_json(),
            data=self._data,
        )


def slowest_of(own_s: Sequence[float], shards: Sequence[int]) -> dict[str, Any]:
    """The fields of a line; none where nothing was measured. own_s, shards: of each rank.

    A rank that has more shards than others is slow by no fault of its machine: the others count as
    if they had as many, at their own pace.
    """
    ranks = range(len(shards)) if own_s else range(0)
    if len(ranks) < 2:
        return {}
    slowest = max(ranks, key=own_s.__getitem__)
    others_s = [own_s[each] * max(1.0, shards[slowest] / shards[each]) for each in ranks if each != slowest]
    slowest_s, median_s = round(own_s[slowest], _DIGITS), round(median(others_s), _DIGITS)
    return {"slowest_rank": slowest, "slowest_s": slowest_s, "others_s": median_s}


def first_step_notes(state: State, averaged: list[str], shards: int) -> list[str]:
    """Notes on results that are the same at every world size, and perhaps not meant.

    Nothing is refused: whether a hook is linear, or a buffer a running average, cannot be known.
    A module's own backward hooks are not mentioned: most only look. averaged: names of the buffers
    that became a mean of different values.
    """
    hooked = [state.name_of(p) for p in state.trained if p._backward_hooks]  # noqa: SLF001 - no public name
    found = list[str]()
    if hooked and shards > 1:
        found.append(
            f"{', '.join(hooked[:_NAMED])} has a hook on its gradient (register_hook), called for each of the {shards} shards; with step.mean_loss it sees the "
            f"gradient divided by {shards}. A hook that is not linear, such as a clip, gives another result than in plain PyTorch: change .grad after the call"
        )
    if averaged and shards > 1:
        found.append(
            f"{', '.join(averaged[:_NAMED])}: a buffer of floats that a forward changes becomes the mean over the {shards} shards. That is right for a running "
            "average, and not for a queue, a codebook or a counter: update those in the loop's body, from step.sum"
        )
    return found


def _next_chain(chain: str, outcome: StepOutcome) -> str:
    """sha256 over the chain so far and the losses of a step, as bits."""
    # All NaNs become one: which of two NaNs an addition passes on depends on their order.
    numbers = [number if number == number else math.nan for number in outcome.losses]  # noqa: PLR0124
    return hashlib.sha256(bytes.fromhex(chain) + struct.pack(f"<{len(numbers)}d", *numbers)).hexdigest()
