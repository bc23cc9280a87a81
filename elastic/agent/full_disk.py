"""A full disk under the run directory is said once, and what waits is written later.

It costs saves while it lasts. It does not promise more than the backlog holds (system/backlog.py).
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elastic.config.run_dir import RunDir
from elastic.observe import metrics_files
from elastic.system.backlog import LIMIT_BYTES, Backlog
from elastic.system.clock import Clock

# A disk that is full has a page to spare now and then, which is no news.
ROOM_S = 5.0


class FullDisk:
    def __init__(self, backlog: Backlog, run: RunDir, report: Callable[[str], None], clock: Clock) -> None:
        self.backlog = backlog
        self._run = run
        self._report = report
        self._clock = clock
        self._is_said = False
        self._waited_s = 0.0  # when something waited last

    def poll(self, *, is_first: bool, at_once: bool = False) -> None:
        """is_first: rank 0 is on this node. Else another node writes the metrics.

        at_once: also soon after a try that failed.
        """
        now_s = self._clock.monotonic()
        if self.backlog.is_empty:
            if now_s - self._waited_s >= ROOM_S:
                self._say_room()
            return
        self._waited_s = now_s
        if not self._is_said:
            self._is_said = True
            self._report(
                f"no room in {self._run.local}: until there is, nothing is saved, and metrics, events and logs are kept in memory,"
                f" {LIMIT_BYTES // 2**20} MiB at most; training goes on. Free space there"
            )
        lines = self._waiting_metrics()
        try:
            others = lines if not is_first or self._is_superseded(lines) else []
        except OSError:
            return  # the next look tells which generation is the newest
        self.backlog.write_out(without=others, at_once=at_once)
        if lines and not self._waiting_metrics():
            self._follow_up(lines, self._report, is_lost=bool(others))

    def poll_at_the_end(self, *, is_first: bool) -> None:
        """Before the console is closed; what it says last is how the run ended."""
        self.poll(is_first=is_first, at_once=True)
        if self.backlog.is_empty:
            self._say_room()

    def _say_room(self) -> None:
        if self._is_said:
            self._is_said = False
            self._report(f"there is room in {self._run.local} again; what waited for it is written")

    def close(self) -> None:
        """A last try, with the console closed."""
        lines = self._waiting_metrics()
        if not self.backlog.write_out(at_once=True):
            print(
                f"no room in {self._run.local} to the end: the newest metrics, events and logs are lost",
                flush=True,
            )
        self._follow_up(lines, print, is_lost=False)

    def _waiting_metrics(self) -> list[Path]:
        """Those that generations have, and not those that are this node's alone."""
        return [
            each for each in self.backlog.waiting_in(self._run.local) if metrics_files.generation_of(each)
        ]

    def _is_superseded(self, lines: list[Path]) -> bool:
        """Whether a newer generation has begun without them."""
        waiting = max(map(metrics_files.generation_of, lines), default=None)
        return waiting is not None and metrics_files.newest_generation(self._run.metrics) > waiting

    def _follow_up(self, lines: list[Path], report: Callable[[str], None], *, is_lost: bool) -> None:
        """`lines` are written or dropped. What was known before may be old: this process may have
        been frozen since then.
        """
        with suppress(OSError):  # the next line of rank 0 shows them, or the next resume
            if is_lost or self._is_superseded(lines):
                report(
                    "lines of the metrics that waited for room on this node are lost: rank 0 is on another one now"
                )
            elif lines:
                metrics_files.show(self._run.metrics)
