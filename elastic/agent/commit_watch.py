"""The group remembers the newest step that was committed, whichever node committed it.

Each agent reads what its own uploader records, and reports a newer commit with one version of the
group. A restore that finds only older states then knows that it misses one.

It does not promise that the newest commit is known: a node may die between it and the report.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elastic.events import CheckpointCommitted
from elastic.observe import logged_event
from elastic.observe.log import parse_lines
from elastic.system.clock import Clock
from elastic.system.growing_file import GrowingFile

POLL_S = 0.25


class CommitWatch:
    """events: the uploader's own. saved: takes each step. report: takes the newest; returns whether
    the group has it now.
    """

    def __init__(
        self, events: Path, saved: Callable[[int], object], report: Callable[[int], bool], clock: Clock
    ) -> None:
        self._events = GrowingFile(events)
        self._saved = saved
        self._report = report
        self._clock = clock
        self._newest = self._reported = 0
        self._polled_s = float("-inf")

    def poll(self, *, at_once: bool = False) -> None:
        """at_once: also shortly after the last poll."""
        now_s = self._clock.monotonic()
        if now_s - self._polled_s < POLL_S and not at_once:
            return
        self._polled_s = now_s
        with suppress(OSError):  # a file that cannot be read is looked at again, and ends no agent
            for each in parse_lines(self._events.lines_to_end(), logged_event.parse):
                if isinstance(each.event, CheckpointCommitted):
                    self._saved(each.event.step)
                    self._newest = max(self._newest, each.event.step)
        if self._newest > self._reported and self._report(self._newest):
            self._reported = self._newest
