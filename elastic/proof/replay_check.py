"""Every rank knows what the lost steps gave, and all of them end at the first one that differs.

Rank 0 has read it in its metrics. What is compared is known to all ranks alike after each step, so
that no message is needed until a step differs.
"""

import json
from dataclasses import astuple

import torch

from elastic.data.record import DataRecord, has_same_steps
from elastic.errors import ReplayDiffers
from elastic.events import ReplayDiffered
from elastic.observe.log import EventLog, read_rare
from elastic.observe.metrics import Rewound
from elastic.observe.step_line import StepLine
from elastic.proof import replay
from elastic.proof.replay import FirstTime, Replay, first_times
from elastic.proof.step_again import no_determinism
from elastic.train.groups import ProcessGroups
from elastic.train.loop.build import LoopParts
from elastic.train.state.restore import ResumePoint


class ReplayCheck:
    """log: on rank 0 alone."""

    def __init__(self, begun: Replay, run_url: str, log: EventLog | None) -> None:
        self._restored = begun.restored
        self._steps = dict(begun.steps)
        self._excuse = begun.excuse
        self._run_url = run_url
        self._log = log

    def check(self, line: StepLine, groups: ProcessGroups) -> None:
        """Before the line of a step is written, or its state kept.

        Raises ReplayDiffers on every rank where it differs and nothing excuses it.
        """
        first = self._steps.pop(line.step, None)
        if first is None or first.chain == line.chain:
            return
        self._steps = {}  # a chain value stays another one
        loss, excuse = replay.finite(line.loss), ""
        if self._log is not None:
            excuse = self._excuse or no_determinism()
            self._log.record(
                ReplayDiffered(
                    step=line.step,
                    restored=self._restored,
                    loss_before=first.loss,
                    loss_now=loss,
                    excuse=excuse,
                )
            )
        # Only now may another rank end: its agent kills those of its node that have not.
        excuse = groups.from_rank0(excuse)
        if not excuse:
            raise ReplayDiffers(replay.sentence(first, loss, self._restored, self._run_url))
        if self._log is not None:
            print(replay.note(first, loss, excuse), flush=True)


def begin_replay(
    parts: LoopParts, point: ResumePoint, rewound: Rewound, there: DataRecord | None, now: DataRecord
) -> Replay:
    """The steps that must come out as before, on every rank.

    there: what stands beside the state; at step 0 what the run began with. Steps of another length
    of the run are said to be others already, and earlier code may have hashed other numbers. A
    check by `elastic-train check` compares more, and names what differs.
    """
    found: list[FirstTime] = []
    excuse, output = "", parts.output
    if output is not None and rewound.dropped and parts.trace is None and there is not None:
        if there.recipe and has_same_steps(there, now):
            ends = [each for each in read_rare(output.events, ReplayDiffered) if not each.event.excuse]
            found = first_times(
                rewound.last,
                rewound.dropped,
                restored=point.step,
                chain=point.chain,
                known=point.divergence,
                ended=max((each.generation for each in ends), default=0),
            )
        excuse = "the recipe was edited in between" if there.recipe != now.recipe else point.doubt
    return Replay(restored=point.step, steps=_told_by_rank0(found, parts.groups), excuse=excuse)


def _told_by_rank0(found: list[FirstTime], groups: ProcessGroups) -> dict[int, FirstTime]:
    """What rank 0 has found, by step, on every rank."""
    text = json.dumps([astuple(each) for each in found]).encode() if found else b""
    size_bytes = groups.from_rank0(len(text))
    if size_bytes and groups.world_size > 1:
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8) if groups.rank == 0 else None
        text = bytes(groups.broadcast(mine, size_bytes, source=0).numpy())
    values = json.loads(text) if size_bytes else []
    names = FirstTime.__slots__
    return {each[0]: FirstTime(**dict(zip(names, each, strict=True))) for each in values}
