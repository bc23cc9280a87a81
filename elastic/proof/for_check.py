"""For `elastic-train check`: what a step leaves behind is written down entry by entry.

Rank 0 writes one line for each step of each generation: its evidence, and what the recipe logged.
A run ends where the check has enough steps, or drains after the step that it names. Without a check
there is no trace, and no step pays for it.
"""

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

from elastic.config.environment import CheckRequest
from elastic.observe.step_line import StepLine
from elastic.proof.evidence import Evidence, TraceLine
from elastic.system.clock import Clock


class StateTrace:
    def __init__(self, request: CheckRequest, *, writes: bool, agent_pid: int, clock: Clock) -> None:
        """writes: on rank 0 alone, which also asks the agent to leave."""
        self._request = request
        self._path = Path(request.trace) if writes else None
        self._agent_pid = agent_pid
        self._clock = clock
        self._began_s = clock.monotonic()
        self._notes: list[str] = []

    def note(self, sentence: str) -> None:
        """What the run says on its console stands in the next line."""
        self._notes.append(sentence)

    def wants_drain(self, step: int) -> bool:
        """Whether the node is to leave after this step, exactly as if it were told to."""
        if step != self._request.leave_at:
            return False
        if self._path is not None:
            os.kill(self._agent_pid, signal.SIGTERM)
        return True

    def add(self, line: StepLine, found: Evidence, *, steps: int, shards: int) -> None:
        """Write a step down. steps, shards: of the run."""
        if self._path is None:
            return
        written = TraceLine(
            step=line.step,
            generation=line.generation,
            world_size=line.world_size,
            steps=steps,
            shards=shards,
            entries=found.entries
            | {f"step.log({name}=...)": repr(value) for name, value in line.values.items()},
            epoch=line.epoch,
            notes=self._notes,
        )
        self._notes = []
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(written)) + "\n")

    def is_over(self, step: int) -> bool:
        """Whether the check needs no step after this one."""
        seconds = self._clock.monotonic() - self._began_s
        return step >= self._request.least_steps and seconds >= self._request.seconds
