"""What a run's metrics say is in TensorBoard's files, each step once, whatever was done again.

A thread of the agent of rank 0 follows the run's files; neither the step loop nor the agent's loop
waits for it. Beside the event files, `written.json` says how far they go. What they have beyond
that, because an agent died, is replaced; and so are the steps that the run goes back over.
"""

import json
import math
import re
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from elastic.agent.actions import AgentParts
from elastic.agent.settings import Settings
from elastic.monitoring.event_files import EventFile
from elastic.monitoring.followed_metrics import WentBack
from elastic.monitoring.followed_run import FollowedRun
from elastic.monitoring.run_totals import PHASES, Recovered
from elastic.observe.step_line import StepLine
from elastic.system.clock import Clock
from elastic.system.files import read_if_there, replace_whole
from elastic.system.output import print_if_read
from elastic.system.untrusted import decode

POLL_S = 1.0
CATCH_UP_POLL_S = 0.1
RETRY_S = 10.0
STOP_S = 5.0
WRITTEN = "written.json"
RECOVERY = "elastic/recovery"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """step: the last one in the files, done by `generation`. recovery: the last generation whose
    recovery is in them; 0 for none.
    """

    step: int = 0
    generation: int = 0
    recovery: int = 0


class TensorBoardWriter:
    """Takes what became of the steps, in order. Calls raise OSError."""

    def __init__(self, folder: Path, *, writer: str, clock: Clock) -> None:
        """folder: of this run alone. writer: a name for people."""
        self._folder = folder
        self._writer = writer
        self._clock = clock
        self._saved = self._written = _read(folder / WRITTEN)
        # What files have beyond the step that they are known to reach, the next one replaces.
        self._dropped_from: float = self._written.step + 1
        self._first_step = self._written.step + 1
        self._file: EventFile | None = None  # there is one once it has something

    @property
    def step(self) -> int:
        """The last one that was written."""
        return self._written.step

    def add(self, item: StepLine | WentBack) -> None:
        written = self._written
        if isinstance(item, WentBack):
            if item.step < written.step:
                self._go_back(item.step)
            return
        if item.step <= written.step:
            if item.generation <= written.generation:
                return  # it is there
            self._go_back(item.step - 1)
        self._opened().add_step(item)
        self._written = replace(self._written, step=item.step, generation=item.generation)

    def add_recoveries(self, recovered: list[Recovered]) -> None:
        """recovered: all of the run so far."""
        for each in recovered:
            if each.generation > self._written.recovery or each.step >= self._dropped_from:
                self._opened().add_text(RECOVERY, sentence(each), step=each.step, time=each.time)
        newest = max((each.generation for each in recovered), default=0)
        self._written = replace(self._written, recovery=max(newest, self._written.recovery))
        self._dropped_from = math.inf

    def save(self) -> None:
        """Make it visible, and note how far it goes."""
        if self._written != self._saved:
            if self._file is not None:
                self._file.flush()
            data = json.dumps(asdict(self._written)).encode()
            replace_whole(self._folder / WRITTEN, data, fsync=False)
            self._saved = self._written

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _opened(self) -> EventFile:
        if self._file is None:
            now, first_step = self._clock.wall(), self._first_step
            self._file = EventFile(self._folder, writer=self._writer, first_step=first_step, now=now)
        return self._file

    def _go_back(self, step: int) -> None:
        """Files before the next one count up to this step."""
        if self._file is not None:
            self._file.flush()
        self.close()
        self._written = replace(self._written, step=step)
        self._first_step = step + 1
        self._dropped_from = min(self._dropped_from, step + 1)


class TensorBoardMonitor:
    def __init__(self, folder: Path, clock: Clock) -> None:
        """folder: runs have folders of their own in it."""
        self._folder = folder
        self._clock = clock
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, parts: AgentParts) -> None:
        follower = _Follower(parts, partial(self._writer, parts.settings))
        self._thread = threading.Thread(target=self._work, args=[follower], name="tensorboard", daemon=True)
        self._thread.start()

    def catch_up(self, settings: Settings) -> str:
        """The disk was full until the run ended, or the run had no `--tensorboard`."""
        if settings.run.is_remote:
            return "nothing is written for TensorBoard: no file of this run is here"
        try:
            return self._made_up(settings)
        except OSError as error:
            return (
                f"the steps that TensorBoard lacks are not written to {self._folder} ({error});"
                " mend that, and give the same command again"
            )

    def _made_up(self, settings: Settings) -> str:
        with (
            closing(FollowedRun(settings.run, settings.node)) as run,
            closing(self._writer(settings)) as writer,
        ):
            while not run.is_caught_up:
                for item in [*run.poll()]:
                    writer.add(item)
            writer.add_recoveries(run.totals.recovered)
            writer.save()
            return f"{self._folder} has the run's {writer.step} steps for TensorBoard"

    def _writer(self, settings: Settings) -> TensorBoardWriter:
        folder = self._folder / (re.sub(r"[^A-Za-z0-9._-]", "-", settings.uid).lstrip(".") or "run")
        return TensorBoardWriter(folder, writer=settings.node, clock=self._clock)

    def stop(self) -> None:
        """End the thread in `STOP_S`; it first writes what the run's files hold."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _work(self, follower: "_Follower") -> None:
        pause_s = 0.0
        while not self._ending.wait(pause_s):
            pause_s = follower.try_poll()
        while (pause_s := follower.try_poll()) < POLL_S:  # lines are left; `stop` does not wait for ever
            pass
        if pause_s == RETRY_S:
            follower.report_end()
        follower.close()


class _Follower:
    """A writer while this agent has rank 0, and none else."""

    def __init__(self, parts: AgentParts, open_writer: Callable[[], TensorBoardWriter]) -> None:
        self._parts = parts
        self._open_writer = open_writer
        self._run: FollowedRun | None = None
        self._writer: TensorBoardWriter | None = None
        self._has_reported = False
        self._problem = ""  # of the last try that failed

    def try_poll(self) -> float:
        """Returns the seconds to wait before the next one."""
        try:
            return self._poll()
        # The edge of a thread: the files would end without a word. The next try goes on where
        # `written.json` says that they end.
        except Exception as error:
            self.close()
            self._problem = str(error)
            if not self._has_reported:
                self._parts.console.print_line(
                    f"nothing is written for TensorBoard ({error}); training goes on, and it is tried again"
                )
            self._has_reported = True
            return RETRY_S

    def report_end(self) -> None:
        """The run ends, and what is missing stays so."""
        # Not by the console's thread, which has ended by now.
        print_if_read(
            f"the files for TensorBoard lack the run's newest steps ({self._problem});"
            " the same command again writes them, also where the run has finished",
            file=sys.stdout,
        )

    def close(self) -> None:
        if self._run is not None:
            self._run.close()
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
        self._run = self._writer = None

    def _poll(self) -> float:
        settings = self._parts.settings
        if not self._parts.group.is_first:
            self.close()
            return POLL_S
        if self._run is None or self._writer is None:
            self._run, self._writer = FollowedRun(settings.run, settings.node), self._open_writer()
        run, writer = self._run, self._writer
        items = [*run.poll()]
        start = run.totals.start
        if start is not None and start.node != settings.node and run.is_caught_up:
            self.close()  # an agent that was cut off may still believe that it has rank 0
            return POLL_S
        for item in items:
            writer.add(item)
        if run.is_caught_up:
            writer.add_recoveries(run.totals.recovered)
        writer.save()
        return POLL_S if run.is_caught_up else CATCH_UP_POLL_S


def sentence(recovered: Recovered) -> str:
    recovery = recovered.recovery
    phases = [(phase.replace("_", " "), getattr(recovery, f"{phase}_s")) for phase in PHASES]
    shown = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases if seconds is not None)
    took = "" if recovery.total_s is None else f", {recovery.total_s:.2f} s"
    source = recovery.source or "none"
    return (
        f"generation {recovered.generation} ({recovery.cause}): {recovery.lost_steps} lost steps, state from {source}"
        f"{took}{f' ({shown})' if shown else ''}"
    )


def _read(path: Path) -> Written:
    """What cannot be read counts as nothing: then the files are written from the start."""
    with suppress(ValueError, OSError):
        return decode(Written, read_if_there(path), what=WRITTEN)
    return Written()
