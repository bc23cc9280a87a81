"""The functions of `run.on_step` are called once for each step that counts, and change nothing.

Rank 0 calls them when the step's line is written, unless an earlier generation wrote a line of that
step: a step that is done again was reported then. So a worker that is killed between the line and
the end of a call has reported that step to some of them or to none; no step is reported twice.
Three cases are left, in which the line is lost, and with it the memory of the step: the disk did
not take it; it was not on a disk yet when the machine lost its power; it was in a local copy of a
run directory at a URL, on a machine that is gone.

What a function raises never ends training, since it is mostly a tracker that cannot be reached: it
is shown once, and the function is called again for the next step. What it draws is taken back. A
function that changes the state is refused, because one rank alone calls it.
"""

import json
import sys
import traceback
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from elastic.data import random_streams
from elastic.errors import ElasticError, UsageError
from elastic.events import OnStepFailed
from elastic.observe.log import EventLog
from elastic.observe.step_line import StepLine
from elastic.system.silence import Phase
from elastic.worker.heartbeat import HeartbeatSender

Function = Callable[[dict[str, Any]], object]
_LONGEST_WORDS = 500


class StepFunctions:
    """reported: the highest step that was ever reported, as far as the run's files tell."""

    def __init__(self) -> None:
        self.reported = 0
        self._functions: list[Function] = []
        # By their places: lambdas and instances of one class have one name.
        self._failed: set[int] = set()
        self._is_running = False

    def __bool__(self) -> bool:
        return bool(self._functions)

    def add(self, function: Any) -> None:
        """Raises UsageError for what cannot be called."""
        if not callable(function):
            raise UsageError(
                f"expected run.on_step(function), a function of a step's record, found {type(function).__name__}"
            )
        self._functions.append(function)

    def refuse_inside(self, name: str) -> None:
        """Raises UsageError for a call in which all ranks meet: only rank 0 is here."""
        if self._is_running:
            raise UsageError(
                f"{name} was called by a function of run.on_step, which rank 0 alone calls, and the other ranks do not: call it in the body of the loop"
            )

    def report(
        self, line: StepLine, heartbeat: HeartbeatSender, log: EventLog, mark: Callable[[], object]
    ) -> None:
        """Call each with the record of metrics.jsonl, unless the step was reported before.

        mark: of the state; another one afterwards raises UsageError.
        """
        if line.step <= self.reported:
            return
        self.reported = line.step
        text, before = json.dumps(line.to_json()), mark()
        phase, self._is_running = heartbeat.phase, True
        heartbeat.enter(Phase.BETWEEN)  # the recipe's own code, as slow as it may be there
        try:
            with random_streams.kept():
                for index in range(len(self._functions)):
                    # Numbers that are not finite are null in the file.
                    self._call(line.step, index, json.loads(text, parse_constant=lambda _: None), log)
        finally:
            self._is_running = False
            heartbeat.enter(phase)
        if mark() != before:
            raise UsageError(
                f"a function of run.on_step ({', '.join(map(_name_of, self._functions))}) changed the State at step {line.step}: rank 0 alone calls it."
                " Change the State in the body of the loop, and try other weights in a copy of the model"
            )

    def _call(self, step: int, index: int, record: dict[str, Any], log: EventLog) -> None:
        function = self._functions[index]
        try:
            function(record)
        except ElasticError:
            raise  # a wrong call of this library is the recipe's mistake, and no outage
        # A tracker's client may exit where it cannot log in, and give up a request of asyncio.
        except (Exception, SystemExit, CancelledError) as error:
            if index in self._failed:
                return
            self._failed.add(index)
            name = _name_of(function)
            words = "".join(traceback.format_exception_only(error)).strip()[:_LONGEST_WORDS]
            log.record(OnStepFailed(step=step, function=name, message=words))
            with suppress(OSError):  # standard error has lost its reader
                traceback.print_exc()
                print(
                    f"run.on_step: {name} raised at step {step} ({words}); training goes on, and it is called again for the next step",
                    file=sys.stderr,
                    flush=True,
                )


def _name_of(function: Function) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
