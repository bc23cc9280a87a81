"""The agent's console shows whole lines of its workers, each worker's in order, with a prefix.

It does not promise the order of lines of different workers, nor lines longer than `LINE_LIMIT`,
which are cut. A line without an end, such as a progress bar, is shown once it ends. A slow or
closed console never holds up training: workers write into log files, one thread of the agent reads
those, and the agent waits at most `STOP_WITHIN_S` for that thread.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import TextIO

from elastic.config.run_dir import RunDir
from elastic.events import FirstStep, RunStarted
from elastic.observe import logged_event
from elastic.observe.generations import generations
from elastic.observe.log import parse_lines, read_events, read_rare
from elastic.observe.metrics import newest, newest_lines
from elastic.observe.recovery import recoveries
from elastic.observe.step_columns import columns_of
from elastic.observe.step_line import StepLine, loss_words
from elastic.system.clock import Clock
from elastic.system.growing_file import GrowingFile
from elastic.system.untrusted import printable
from elastic.system.worker_protocol import QUOTED

LINE_LIMIT = 4000
POLL_S = 0.1
PROGRESS_EVERY_S = 5.0
STOP_WITHIN_S = 5.0


def progress_line(newest: StepLine, steps: int | None) -> str:
    return (
        f"step {newest.step}{'' if steps is None else f'/{steps}'} loss {loss_words(newest.loss)}"
        f" world {newest.world_size} generation {newest.generation}"
    )


class ConsoleFollower:
    """The thread that follows the logs of this node's workers, and the run's metrics.

    Of progress it shows the first line, then at most one per `PROGRESS_EVERY_S`, then the last.
    Lines of metrics that are there at the start are not shown: they are progress of an earlier
    start of the run, which this one may resume from far behind them.
    """

    def __init__(self, run: RunDir, node: str, out: TextIO, clock: Clock) -> None:
        self._run = run
        self._metrics = run.metrics_of(node)
        self._of_rank0 = GrowingFile(run.events / f"{node}-worker0.jsonl")  # where that is rank 0
        self._out = out
        self._clock = clock
        self._followed: dict[str, GrowingFile] = {}
        self._requests: deque[Callable[[], None]] = deque()
        self._ending = threading.Event()
        self._shown = self._newest()
        self._progress_due_s = -inf
        self._thread = threading.Thread(target=self._work, name="console", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def follow(self, path: Path, prefix: str) -> None:
        """Print the lines of a log that may not exist yet.

        The log before it of the same prefix is read to its end first.
        """
        self._requests.append(partial(self._follow, prefix, path))

    def print_line(self, text: str) -> None:
        """Print a line of the agent itself, in order with the workers' lines."""
        # The text may quote another node, which must not command this terminal.
        self._requests.append(partial(self._show, printable(text)))

    def stop(self, within_s: float = STOP_WITHIN_S) -> None:
        """End the thread in that time; it first prints what the logs hold."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def _work(self) -> None:
        try:
            while not self._ending.wait(POLL_S):
                self._poll()
            self._poll()
            for prefix in self._followed:
                self._finish(prefix)
            self._show_progress(is_last=True)
        except Exception as error:
            # A closed pipe or a full disk behind stdout ends the console only. Without this message
            # the console would fall silent, and a training that goes on would look like one that
            # hangs.
            warning = f"console output ends here ({error}); training goes on, see {self._run.logs}\n"
            with suppress(OSError, ValueError):
                os.write(sys.stderr.fileno(), warning.encode())

    def _poll(self) -> None:
        while self._requests:
            self._requests.popleft()()
        for prefix, log in self._followed.items():
            self._print(prefix, _new_lines(log))
        self._show_recoveries()
        self._show_progress()

    def _follow(self, prefix: str, path: Path) -> None:
        if prefix in self._followed:
            self._finish(prefix)
        self._followed[prefix] = GrowingFile(path)

    def _finish(self, prefix: str) -> None:
        """What a log still has, also a last line whose writer was killed within it."""
        log = self._followed[prefix]
        while lines := _new_lines(log):
            self._print(prefix, lines)
        if rest := log.unfinished(LINE_LIMIT):
            self._print(prefix, [rest])
        log.close()

    def _print(self, prefix: str, lines: Iterable[bytes]) -> None:
        for line in lines:
            if not line.startswith(QUOTED.encode()):  # else in the log alone
                self._show(f"[{prefix}] {_shown(line)}")

    def _show_recoveries(self) -> None:
        """Say what each one cost, once its generation has brought a new step."""
        for each in parse_lines(_new_lines(self._of_rank0), logged_event.parse):
            if isinstance(each.event, FirstStep):
                with suppress(OSError):  # unreadable events cost the line
                    events = read_events(self._run.events)
                    trained = columns_of(newest_lines(self._metrics))
                    for one in recoveries(generations(events, trained)):
                        if one.generation == each.generation and one.line:
                            self._show(printable(one.line))

    def _show_progress(self, *, is_last: bool = False) -> None:
        line, now_s = self._newest(), self._clock.monotonic()
        if line is None or line == self._shown or (now_s < self._progress_due_s and not is_last):
            return
        self._shown, self._progress_due_s = line, now_s + PROGRESS_EVERY_S
        lengths = [(each.generation, each.event.steps) for each in read_rare(self._run.events, RunStarted)]
        self._show(progress_line(line, max(lengths, default=(0, None))[1]))

    def _show(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def _newest(self) -> StepLine | None:
        with suppress(OSError):  # unreadable metrics cost the progress, not the console
            return newest(self._metrics)
        return None


def _new_lines(file: GrowingFile) -> list[bytes]:
    """Of one read: a worker that writes without a pause holds up no other line.

    What cannot be read costs its lines, not the console.
    """
    with suppress(OSError):
        return next(file.texts_to_end(), b"").split(b"\n")[:-1]
    return []


def _shown(line: bytes) -> str:
    """As on a terminal, where text after a carriage return is drawn over the text before it."""
    text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    cut = len(text) - LINE_LIMIT
    return text if cut <= 0 else f"{text[:LINE_LIMIT]} (cut, {cut} more characters in the log)"
