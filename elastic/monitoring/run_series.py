"""A thread follows the run, so that a scrape adds up nothing and waits for no disk.

The agent of rank 0 has them, and no other. They appear once the run's files were read to their end,
since counters that rise while an old run is read would look like news. They vanish where the files
cannot be read: no value is better than one that stands still.
"""

import threading
from collections.abc import Callable

from prometheus_client.core import Metric

from elastic.agent.actions import AgentParts
from elastic.monitoring.followed_run import FollowedRun
from elastic.monitoring.run_families import run_families

POLL_S = 1.0
CATCH_UP_POLL_S = 0.1  # after each read of a long file, which leaves the interpreter to the agent
_STOP_S = 2.0
_LOCK_S = 2.0  # far above what a read of a bounded part takes


class RunSeries:
    """Safe to use from several threads."""

    def __init__(
        self,
        parts: AgentParts,
        *,
        labels: dict[str, str],
        about: dict[str, str],
        report: Callable[[str], None],
    ) -> None:
        """report: prints a line on the console."""
        self._families: list[Metric] = []
        self._lock = threading.Lock()  # held for one bounded read, or to make the families
        self._is_ours = False
        self._parts = parts
        self._labels, self._about = labels, about
        self._report = report
        self._run: FollowedRun | None = None
        self._has_reported = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="run-series", daemon=True)

    @property
    def families(self) -> list[Metric]:
        """Of the run; empty on an agent that does not export them, or cannot read them now."""
        if not self._lock.acquire(timeout=_LOCK_S):
            return []  # the disk has not answered for as long
        try:
            run = self._run
            if run is None or not self._is_ours:
                return []
            if run.is_caught_up:
                now_s = self._parts.clock.wall()
                self._families = run_families(run, labels=self._labels, about=self._about, now_s=now_s)
            return self._families
        finally:
            self._lock.release()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def _work(self) -> None:
        pause_s = 0.0
        while not self._ending.wait(pause_s):
            pause_s = self.try_poll()

    def try_poll(self) -> float:
        """Returns the seconds to wait before the next one."""
        try:
            self.poll()
        # The edge of a thread: values that stand still would look like a run that does.
        except Exception as error:
            with self._lock:
                self._forget()
            if not self._has_reported:
                self._report(f"the run's series are not served: {error}; training goes on")
            self._has_reported = True
        return CATCH_UP_POLL_S if self._run is not None and not self._run.is_caught_up else POLL_S

    def poll(self) -> None:
        """Take what is new in the run's files. Raises OSError for what cannot be read."""
        with self._lock:
            if not self._parts.group.is_first:
                self._forget()
                return
            if self._run is None:
                settings = self._parts.settings
                self._run = FollowedRun(settings.run, settings.node)
            for _ in self._run.poll():
                pass
            if self._run.is_caught_up:
                start = self._run.totals.start
                # An agent that was cut off may still believe that it has rank 0; the files know
                # better.
                self._is_ours = start is not None and start.node == self._parts.settings.node

    def _forget(self) -> None:
        if self._run is not None:
            self._run.close()
        self._run, self._is_ours, self._families = None, False, []
