"""A full disk under the run directory is said once, and what waits is written later.

It costs saves while it lasts. It does not promise more than the backlog holds (system/backlog.py).
"""

from collections.abc import Callable

from elastic.config.run_dir import RunDir
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

    def poll(self, *, is_first: bool) -> None:
        """is_first: rank 0 is on this node. Else another node writes the metrics."""
        now_s = self._clock.monotonic()
        if self.backlog.is_empty:
            if self._is_said and now_s - self._waited_s >= ROOM_S:
                self._is_said = False
                self._report(self._news)
            return
        self._waited_s = now_s
        if not self._is_said:
            self._is_said = True
            self._report(
                f"no room in {self._run.local}: until there is, nothing is saved, and metrics, events and logs are kept in memory,"
                f" {LIMIT_BYTES // 2**20} MiB at most; training goes on. Free space there"
            )
        is_shared = not (is_first or self._run.is_remote)
        if is_shared and self.backlog.waits_for(self._run.metrics):
            self._report(
                "lines of the metrics that waited for room on this node are lost: rank 0 is on another one now"
            )
        self.backlog.write_out(without=[self._run.metrics] if is_shared else [])

    def close(self) -> None:
        """A last try, with the console closed."""
        if not self.backlog.write_out(at_once=True):
            print(
                f"no room in {self._run.local} to the end: the newest metrics, events and logs are lost",
                flush=True,
            )
        elif self._is_said:
            print(self._news, flush=True)

    @property
    def _news(self) -> str:
        return f"there is room in {self._run.local} again; what waited for it is written"
